"""Train a character language model in PyTorch with n replicas in one process and with one, and compare the loss curves.

    python examples/torch_characters.py [--replicas 4] [--steps 120]

The text is the language reference that pydoc ships with every Python. The model is an MLP that predicts a character
from the twelve before it. The training step is ordinary torch code plus one call: ``all_reduce`` of the gradients.

How far apart may the curves be? The runs differ only in the order in which gradients are added, so only by rounding.
Training amplifies rounding errors by a factor that is not known in advance, but is to first order the same in every
precision. So both runs are repeated in float64, in which rounding is 2**29 times finer. The float32 curves may differ
by 2**29 times the difference of the float64 curves, times 8 since single errors are random; else the exit code is 1.

Source of the model: Bengio et al., A neural probabilistic language model, JMLR 3, 2003.
"""

import argparse
import sys
import time
from pydoc_data.topics import topics

import torch

import crossreduce as cr

BEFORE = 12  # characters that a prediction is made from
BATCH = 250  # samples; on 4 replicas 63, 63, 62 and 62
SAMPLES = 4_600  # an epoch's last batch has 100
FINER = 2**29  # float32 keeps 24 bits of a number, float64 53
MARGIN = 8


def samples():
    """Return the inputs (the characters before each sample), the characters to predict, and the alphabet's size."""
    text = "".join(topics[name] for name in sorted(topics))[: SAMPLES + BEFORE]
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[character] for character in text])
    return codes.unfold(0, BEFORE + 1, 1)[:, :-1].contiguous(), codes[BEFORE:].clone(), len(alphabet)


def batches(steps, x, y):
    """Yield one batch per step, in a fixed random order, epoch after epoch."""
    random = torch.Generator().manual_seed(0)
    while steps > 0:
        for chosen in torch.randperm(len(x), generator=random).split(BATCH)[:steps]:
            yield x[chosen], y[chosen]
            steps -= 1


def step(model, optimizer, batch, size):
    """Train a replica on its share of a batch of ``size`` samples; return its part of the mean loss."""
    x, y = batch
    optimizer.zero_grad()
    loss = torch.nn.functional.cross_entropy(model(x), y, reduction="sum") / size
    loss.backward()
    parameters = list(model.parameters())
    summed = cr.get_replica_context().all_reduce("sum", [p.grad for p in parameters])
    for p, gradient in zip(parameters, summed, strict=True):
        p.grad = gradient
    optimizer.step()
    return loss.detach()


def train(replicas, steps, dtype):
    """Train on n replicas; return the loss of each step, and whether all copies of the model are bitwise equal."""
    x, y, characters = samples()
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Embedding(characters, 16),
        torch.nn.Flatten(),
        torch.nn.Linear(16 * BEFORE, 96),
        torch.nn.Tanh(),
        torch.nn.Linear(96, characters),
    ).to(dtype)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9)

    strategy = cr.MirroredStrategy(replicas)
    models, optimizers = strategy.replicate((model, optimizer))
    losses = []
    for batch in batches(steps, x, y):
        parts = strategy.run(step, args=(models, optimizers, strategy.split(batch), len(batch[0])))
        losses.append(float(strategy.reduce("sum", parts)))
    equal = all(
        torch.equal(a, b) for other in models for a, b in zip(models[0].parameters(), other.parameters(), strict=True)
    )
    return losses, equal


def main(replicas, steps):
    """Train with one replica and several, in float64 and float32, and print the float32 losses.

    Return whether the two loss curves are equal up to rounding, the last loss is less than the first (if there are
    several steps), and all copies of the model are equal.
    """
    torch.set_num_threads(1)  # each replica has its own thread
    runs = {}
    for dtype in (torch.float64, torch.float32):
        for n in (1, replicas):
            began = time.perf_counter()
            runs[dtype, n], equal = train(n, steps, dtype)
            print(f"{n} replica{'s' * (n > 1)}, {dtype}: {steps} steps in {time.perf_counter() - began:.1f} s")
            if not equal:
                print("the replicas' models differ")
                return False
    apart = {
        dtype: max(abs(a - b) for a, b in zip(runs[dtype, 1], runs[dtype, replicas], strict=True))
        for dtype in (torch.float64, torch.float32)
    }
    print(f"\n step   1 replica   {replicas} replicas")
    for at in sorted({*range(0, steps, max(1, steps // 10)), steps - 1}):
        print(f"{at:5}   {runs[torch.float32, 1][at]:.7f}   {runs[torch.float32, replicas][at]:.7f}")
    # Each run also rounds its loss, about 4, to float32: an error of up to 2**-22, so a difference of up to 2**-21.
    allowed = MARGIN * (apart[torch.float64] * FINER) + 2**-21
    print(f"\nlargest difference {apart[torch.float32]:.1e}, of which rounding explains up to {allowed:.1e}")
    agree = apart[torch.float32] <= allowed < 0.01
    print("the curves agree" if agree else "THE CURVES DIFFER")
    learned = runs[torch.float32, replicas][-1] < runs[torch.float32, replicas][0]
    return agree and (learned or steps < 2)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a character model on n replicas and on one, and compare.")
    parser.add_argument("--replicas", type=int, choices=range(1, 251), default=4, metavar="N")
    parser.add_argument("--steps", type=int, choices=range(1, 10_001), default=120, metavar="K")
    arguments = parser.parse_args()
    sys.exit(0 if main(arguments.replicas, arguments.steps) else 1)
