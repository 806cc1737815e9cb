"""The engine: what runs next, how it runs, and the process it runs in.

request, blocks, scheduler   pure decisions, no torch: who runs, with which cache blocks
runner, kv_cache, sampler    tensors: inputs of a step, KV cache, the next tokens
core                         EngineCore: start-up phases, and one step in a few lines
args, process, client        the same in a process of its own, seen from asyncio
messages                     what travels between the two processes
"""
