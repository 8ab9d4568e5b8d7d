"""Train a classifier of handwritten digits on ranks of which two are killed, while two new processes join.

The program starts the ranks, kills two of them at random moments, and lets two new processes join with an invitation.
``crossreduce.torch.committed`` repeats the step in which a rank died, among those that are left, and
``crossreduce.torch.grow`` lets the new processes in. Every batch is divided among the current ranks.

Then the program trains again, undisturbed, with the same number of ranks in each step. The losses of both runs must be
equal in every bit, and the network must recognize 97 % of the digits that it was not trained with; else the exit code
is 1.

    python examples/elastic_digits.py [--replicas 4] [--seed 0] [--json FILE]

Source of the data: E. Alpaydin & C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning Repository,
1998; the 1,797 images of 8 x 8 pixels in scikit-learn.
"""

import argparse
import json
import multiprocessing
import random
import sys
import tempfile
import time
from datetime import timedelta
from functools import partial
from multiprocessing import connection
from pathlib import Path

import torch
import torch.distributed as dist
from sklearn.datasets import load_digits

import crossreduce.torch

STEPS = 400
BATCH = 120  # samples per step, over all ranks
TESTED = 360  # images that the network is not trained with
OPEN_EVERY = 5  # new processes may join before every fifth step
TIMEOUT = timedelta(seconds=60)

processes = multiprocessing.get_context("fork")


class Training:
    """A small convolutional network, its optimizer, and the digits; the same on all ranks."""

    def __init__(self):
        torch.set_num_threads(1)
        torch.manual_seed(0)
        digits = load_digits()
        images, labels = torch.tensor(digits.images / 16, dtype=torch.float32), torch.tensor(digits.target)
        images = images.unsqueeze(1)
        mixed = torch.randperm(len(labels))
        tested, trained = mixed[:TESTED], mixed[TESTED:]
        self.images, self.labels = images[trained], labels[trained]
        self.test_images, self.test_labels = images[tested], labels[tested]
        self.model = torch.nn.Sequential(
            torch.nn.Conv2d(1, 8, 3),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.Linear(8 * 6 * 6, 64),
            torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )
        self.parameters = list(self.model.parameters())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1, momentum=0.9)
        for p in self.parameters:
            self.optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)

    def backward(self, step, group=None):
        """Compute the gradients of a batch, together with the other ranks of a group; return the batch's mean loss."""
        chosen = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(step))[:BATCH]
        own = chosen[dist.get_rank(group) :: dist.get_world_size(group)]
        self.optimizer.zero_grad()
        scores = self.model(self.images[own])
        loss = torch.nn.functional.cross_entropy(scores, self.labels[own], reduction="sum") / BATCH
        loss.backward()
        total = loss.detach()
        for x in (total, *(p.grad for p in self.parameters)):
            dist.all_reduce(x, group=group)
        return total.item()

    def receive(self, step, group=None):
        """Send the state of rank 0 to all ranks of a group; return its step."""
        known = torch.tensor(step)
        momentum = [self.optimizer.state[p]["momentum_buffer"] for p in self.parameters]
        for x in (known, *(p.detach() for p in self.parameters), *momentum):
            dist.broadcast(x, 0, group=group)
        return int(known)

    def accuracy(self):
        """Return the share of the test images that are recognized."""
        with torch.no_grad():
            return (self.model(self.test_images).argmax(1) == self.test_labels).double().mean().item()


def train(pipe, store, rank, ranks):
    """Be one of the first ranks."""
    training = Training()
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=ranks, timeout=TIMEOUT)
    go_on(pipe, training, is_new=False)


def train_later(pipe):
    """Be a process that joins when it is sent an invitation."""
    training = Training()  # before it joins, since the other ranks wait for it from then on
    crossreduce.torch.join(pipe.recv())
    go_on(pipe, training, is_new=True)


def go_on(pipe, training, is_new):
    """Train to the end, and report each step."""
    step = 0
    pipe.send(crossreduce.torch.invitation())
    while step < STEPS:
        if is_new or (step % OPEN_EVERY == 0 and crossreduce.torch.grow() is not None):
            is_new = False
            step = crossreduce.torch.committed(partial(training.receive, step))
        loss = crossreduce.torch.committed(partial(training.backward, step))
        training.optimizer.step()  # here all ranks that are left have the same gradients
        pipe.send((step, dist.get_world_size(), loss))
        step += 1
    pipe.send(training.accuracy())
    dist.destroy_process_group()


def train_undisturbed(pipe, store, rank, sizes):
    """Train without failures: in each step the first ``sizes[step]`` ranks take part. Rank 0 reports the losses."""
    dist.init_process_group("crossreduce", f"file://{store}", rank=rank, world_size=max(sizes), timeout=TIMEOUT)
    groups = {size: dist.new_group(range(size)) for size in sorted(set(sizes))}
    training, losses = Training(), []
    for step, size in enumerate(sizes):
        if rank < size:
            if step and size > sizes[step - 1]:
                training.receive(step, groups[size])
            losses.append(training.backward(step, groups[size]))
            training.optimizer.step()
    if rank == 0:
        pipe.send(losses)
    dist.destroy_process_group()


class Ranks:
    """The processes that this program has started, with a pipe to each."""

    def __init__(self):
        self.running = {}

    def start(self, function, *args):
        pipe, other = processes.Pipe()
        process = processes.Process(target=function, args=(other, *args))
        process.start()
        other.close()
        self.running[pipe] = process
        return pipe

    def messages(self):
        """Yield messages with their pipes until all processes have ended.

        Raises:
          RuntimeError: a process has failed.
        """
        while self.running:
            for pipe in connection.wait(list(self.running)):
                try:
                    yield pipe, pipe.recv()
                except (EOFError, ConnectionResetError):
                    process = self.running.pop(pipe)
                    process.join()
                    if process.exitcode not in (0, -9):
                        raise RuntimeError(f"a rank ended with {process.exitcode}") from None


def disturbed(replicas, seed, folder):
    """Train while two ranks are killed and two processes join; return a report."""
    chance, begun = random.Random(seed), time.monotonic()
    events = ["kill", "kill", "join", "join"]
    chance.shuffle(events)
    moments = sorted(chance.sample(range(STEPS // 10, STEPS // 2), len(events)))
    waiting = list(zip(moments, events, strict=True))
    ranks, invitations, trained = Ranks(), {}, set()
    report = {"happened": [], "losses": [], "sizes": [], "seconds": [], "accuracy": set()}
    for rank in range(replicas):
        ranks.start(train, f"{folder}/store", rank, replicas)
    spare = [ranks.start(train_later) for event in events if event == "join"]
    for pipe, message in ranks.messages():
        if isinstance(message, str):
            invitations[pipe] = message
        elif isinstance(message, float):
            report["accuracy"].add(message)
        else:
            step, size, loss = message
            trained.add(pipe)
            if step == len(report["losses"]):
                report["losses"].append(loss)
                report["sizes"].append(size)
                report["seconds"].append(time.monotonic() - begun)
            agreed = (report["losses"][step], report["sizes"][step])
            assert (loss, size) == agreed, f"a rank has trained step {step} with {loss}, {size}, others with {agreed}"
            living = [each for each in ranks.running if each in trained and each in invitations]
            if waiting and step >= waiting[0][0]:
                _, event = waiting.pop(0)
                if event == "join":
                    spare.pop().send(invitations[chance.choice(living)])
                else:
                    time.sleep(chance.uniform(0, 0.01))  # so that it may hit any part of a step
                    victim = chance.choice(living)
                    ranks.running[victim].kill()
                    trained.remove(victim)
                report["happened"].append((time.monotonic() - begun, event))
    assert len(report["accuracy"]) == 1, f"the ranks end with different networks: {report['accuracy']}"
    return report | {"accuracy": report["accuracy"].pop()}


def undisturbed(sizes, folder):
    """Return the losses of a run with these numbers of ranks in its steps."""
    ranks = Ranks()
    for rank in range(max(sizes)):
        ranks.start(train_undisturbed, f"{folder}/store of the undisturbed run", rank, sizes)
    ((_, losses),) = ranks.messages()
    return losses


def main(options):
    """Train twice and compare; return the exit code."""
    with tempfile.TemporaryDirectory() as folder:
        report = disturbed(options.replicas, options.seed, folder)
        alone = undisturbed(report["sizes"], folder)
    sizes, losses = report["sizes"], report["losses"]
    print("step    killed   undisturbed")
    for step in range(0, STEPS, STEPS // 12):
        print(f"{step:4d}   {losses[step]:9.6f}   {alone[step]:9.6f}")
    changes = [step for step in range(STEPS) if step == 0 or sizes[step] != sizes[step - 1]]
    print("ranks: " + ", ".join(f"{sizes[step]} from step {step}" for step in changes))
    print(f"recognized: {report['accuracy']:.2%} of the test images")
    if options.json:
        options.json.write_text(json.dumps(report | {"undisturbed": alone}))
    complete = sizes[0] == sizes[-1] == options.replicas and len(losses) == STEPS
    if not complete:
        print("A PROCESS DID NOT JOIN")
    accurate = report["accuracy"] >= 0.97
    if not accurate:
        print("THE NETWORK IS NOT ACCURATE ENOUGH")
    print("the curves agree" if losses == alone else "THE CURVES DIFFER")
    return 0 if complete and accurate and losses == alone else 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train on ranks of which two are killed, while two processes join.")
    parser.add_argument("--replicas", type=int, choices=range(3, 9), default=4, metavar="N")
    parser.add_argument("--seed", type=int, default=0, help="of the moments at which ranks are killed")
    parser.add_argument("--json", type=Path, help="where to write what happened, and all losses")
    sys.exit(main(parser.parse_args()))
