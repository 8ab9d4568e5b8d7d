"""vLLM with two tensor-parallel ranks. Run, in an environment with vLLM: CROSSREDUCE_VLLM=1 python vllm_tokens.py

The variable lets crossreduce.vllm move the tensors. The model is a Llama of four layers with random weights.
"""

import json
import os
import statistics
import tempfile
import time

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")


def main():
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from vllm import LLM, SamplingParams

    torch.manual_seed(0)
    sizes = {"vocab_size": 256, "hidden_size": 256, "intermediate_size": 512, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "initializer_range": 0.2}
    folder = tempfile.mkdtemp(dir=".")
    LlamaForCausalLM(LlamaConfig(**sizes, **heads)).save_pretrained(folder)
    options = {"skip_tokenizer_init": True, "enforce_eager": True, "distributed_executor_backend": "mp"}
    llm = LLM(folder, tensor_parallel_size=2, dtype="float32", max_model_len=256, max_num_seqs=4, **options)
    prompts = [{"prompt_token_ids": [seed + 3 * k for k in range(8)]} for seed in range(4)]
    greedy = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, detokenize=False)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        results = llm.generate(prompts, greedy, use_tqdm=False)
        times.append((time.perf_counter() - start) / 100 * 1e6)
    print("microseconds", json.dumps({"per token of 4 prompts": round(statistics.median(times))}))
    # In place of losses a number per prompt, which is different for almost all other tokens.
    sums = [sum(k * token for k, token in enumerate(result.outputs[0].token_ids, 1)) for result in results]
    print("losses", json.dumps(sums), flush=True)


if __name__ == "__main__":
    main()
