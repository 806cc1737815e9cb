"""The engine: what runs next, how it runs, and the process it runs in.

request, blocks, scheduler   pure decisions, no torch: who runs, with which cache blocks
runner, kv_cache             tensors: inputs of a step, KV cache
sampler, adjust, logprobs    the next tokens: penalties and bias, the draw, how likely they were
sample_row, seeds            what the sampler knows of a request; random numbers without state
core                         EngineCore: start-up phases, and one step in a few lines
args, process, client        the same in a process of its own, seen from asyncio
messages                     what travels between the two processes
"""
