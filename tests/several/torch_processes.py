"""Processes for tests over several of them: started once, each check runs in all."""

import atexit
import functools
import importlib
import os
import tempfile
import traceback
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing

COUNT = 4


def together(check, *arguments, gpus=False) -> None:
    """Run check(rank, *arguments), a function of a test module, in COUNT processes that form a process group; with `gpus` in
    two of them, each with a GPU of its own. Raises AssertionError with what went wrong in them."""
    pipes = _processes(2, "nccl") if gpus else _processes(COUNT, "gloo")
    for pipe in pipes:
        pipe.send((check.__module__, check.__name__, arguments))
    failures = [f"process {rank}:\n{said}" for rank, said in enumerate(pipe.recv() for pipe in pipes) if said]
    assert not failures, "\n".join(failures)


@functools.cache
def _processes(count, backend):
    context, store = multiprocessing.get_context("forkserver"), Path(tempfile.mkdtemp()) / "store"
    context.set_forkserver_preload(["pytest", "torch.distributed.tensor.debug", "torch_ops.frontend"])  # imported once, not by each
    pipes, processes = [], []
    for rank in range(count):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_serve, args=(rank, count, backend, str(store), theirs), daemon=True))
        processes[-1].start()
        pipes.append(ours)
    atexit.register(lambda: [process.kill() for process in processes])
    return pipes


def _serve(rank, count, backend, store, pipe):
    os.environ["BRIDGE_TEST_FRONTENDS"] = "torch"
    torch.set_num_threads(1)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=count, timeout=timedelta(seconds=60))
    while True:
        module, name, arguments = pipe.recv()
        try:
            getattr(importlib.import_module(module), name)(rank, *arguments)
            pipe.send(None)
        except Exception:
            pipe.send(traceback.format_exc())
