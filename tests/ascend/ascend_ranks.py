"""What ranks do in the tests of the simulated Ascend. A module of its own, so that rank processes can import it.

``python ascend_ranks.py RECIPE FOLDER RANKS`` takes five watched steps and prints what came of them as JSON.
"""

import contextlib
import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from mindspeed_kernels.device import open_device
from mindspeed_runtime.config import load_recipe
from mindspeed_runtime.launch import Pool, world
from mindspeed_train.optimizer import optimizer_tensors
from mindspeed_train.rank import data_of
from mindspeed_train.session import open_session
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

MOVES = ("aten::_to_copy", "aten::copy_", "aten::detach", "aten::lift_fresh", "aten::_local_scalar_dense")


class Watch(TorchDispatchMode):
    """Notes every operator, and those that see or make a tensor off the device or in a type that Ascend does not have.

    Moving a tensor is no computation. Numbers without a dimension are the host's business, and bytes are states of
    generators.
    """

    def __init__(self):
        super().__init__()
        self.seen, self.elsewhere = set(), set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        name = func._schema.name
        self.seen.add(name)
        for x in pytree.tree_leaves((args, kwargs, out)):
            if not isinstance(x, torch.Tensor) or x.dim() == 0 or x.dtype == torch.uint8:
                continue
            if x.device.type != "npu" and name not in MOVES:
                self.elsewhere.add(f"{name} on {x.device.type}")
            if x.device.type == "npu" and x.dtype in (torch.float64, torch.complex128):
                self.elsewhere.add(f"{name} in {x.dtype}")
        return out


def watched_steps(rank, recipe, folder, first, last, load=None, save=None):
    """Take the steps ``first`` to ``last``; the losses, and what was found where it should not be."""
    with open_session(rank, recipe) as session:
        engine, data = session.engine, data_of(recipe, session, folder)
        if load is not None:
            engine.load(load)
        watch, losses = Watch(), []
        for step in range(first, last):
            batches = data.train.step(step)
            with watch if session.device.kind == "npu" else contextlib.nullcontext():
                losses.append(engine.train_step(step, batches, recipe.optimizer.lr).loss)
        if save is not None:
            if rank.is_main:
                save.mkdir()
            engine.share(None)
            engine.save(save)
        held = list(_held(engine))
        return {
            "losses": losses,
            "seen": sorted(watch.seen),
            "elsewhere": sorted(watch.elsewhere),
            "devices": sorted({str(x.device) for x in held}),
            "held": len(held),
        }


def _held(engine):
    """Every tensor of the model, its gradients and the optimizer, but for PyTorch's step counters, which are numbers."""
    for chunk in engine.chunks:
        for module in chunk.modules():
            yield from (x for x in vars(module).values() if isinstance(x, torch.Tensor))
            yield from (x for x in module._buffers.values() if x is not None)
        for parameter in chunk.parameters():
            yield parameter
            yield parameter.main_grad
        for buffer in chunk.buffers:
            yield buffer.grad_data
            if buffer.param_data is not None:
                yield buffer.param_data
    yield from (x for x in optimizer_tensors(engine.optimizer) if x.dim() > 0)


@contextlib.contextmanager
def _group(rank):
    device = open_device("npu", rank.rank)
    with world(rank, device, 60):
        yield device.torch_device


def collectives(rank, names):
    """Each collective over ProcessGroupHCCL, on numbers of which the answer is known."""
    with _group(rank) as device:
        assert type(dist.distributed_c10d._get_default_group()._get_backend(device)).__name__ == "ProcessGroupHCCL"
        return {name: _CASES[name](rank.rank, rank.size, device) for name in names}


def _filled(rank, device, *shape, dtype=torch.float32):
    return torch.full(shape, float(rank + 1), device=device, dtype=dtype)


def _all_reduce(rank, size, device, dtype=torch.float32):
    x = _filled(rank, device, 1 << 20, dtype=dtype)  # more than a socket holds
    dist.all_reduce(x)
    return bool((x == sum(range(1, size + 1))).all()) or x[:3].tolist()


def _maximum_async(rank, size, device):
    x = _filled(rank, device, 5)
    dist.all_reduce(x, op=dist.ReduceOp.MAX, async_op=True).wait()
    return x.tolist() == [size] * 5 or x.tolist()


def _mean(rank, size, device):
    x = _filled(rank, device, 3)
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x.tolist() == [(size + 1) / 2] * 3 or x.tolist()


def _broadcast(rank, size, device):
    x = _filled(rank, device, 3)
    dist.broadcast(x, size - 1)
    return x.tolist() == [size] * 3 or x.tolist()


def _all_gather(rank, size, device):
    out = torch.empty(2 * size, device=device)
    dist.all_gather_into_tensor(out, _filled(rank, device, 2))
    expected = [float(i // 2 + 1) for i in range(2 * size)]
    parts = [torch.empty(2, device=device) for _ in range(size)]
    dist.all_gather(parts, _filled(rank, device, 2))
    return out.tolist() == torch.cat(parts).tolist() == expected or out.tolist()


def _reduce_scatter(rank, size, device):
    out = torch.empty(2, device=device)
    dist.reduce_scatter_tensor(out, torch.arange(2.0 * size, device=device))
    return out.tolist() == [size * 2.0 * rank, size * (2.0 * rank + 1)] or out.tolist()


def _all_to_all(rank, size, device):
    out = torch.empty(size, device=device)
    dist.all_to_all_single(out, torch.arange(float(size), device=device) + 10 * rank)
    return out.tolist() == [10.0 * other + rank for other in range(size)] or out.tolist()


def _uneven_all_to_all(rank, size, device):
    sent = [other + 1 for other in range(size)]
    received = [rank + 1] * size
    out = torch.empty(sum(received), device=device)
    dist.all_to_all_single(out, torch.full((sum(sent),), float(rank), device=device), received, sent)
    return out.tolist() == [float(other) for other in range(size) for _ in range(rank + 1)] or out.tolist()


def _ring(rank, size, device):
    x, y = _filled(rank, device, 1 << 18), torch.empty(1 << 18, device=device)
    jobs = [dist.P2POp(dist.isend, x, (rank + 1) % size), dist.P2POp(dist.irecv, y, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(jobs):
        work.wait()
    return bool((y == (rank - 1) % size + 1).all()) or y[:3].tolist()


def _scatter(rank, size, device):
    out = torch.empty(2, device=device)
    parts = [torch.full((2,), float(other), device=device) for other in range(size)] if rank == 0 else None
    dist.scatter(out, parts, src=0)
    return out.tolist() == [float(rank)] * 2 or out.tolist()


def _reduce(rank, size, device):
    x = _filled(rank, device, 3)
    dist.reduce(x, 0)
    return rank > 0 or x.tolist() == [sum(range(1, size + 1))] * 3 or x.tolist()


def _subgroup(rank, size, device):
    pair, alone = dist.new_group([0, 1]), dist.new_group([0])
    x = _filled(rank, device, 2)
    if rank < 2:
        dist.all_reduce(x, group=pair)
    if rank == 0:
        dist.all_reduce(x, group=alone)
    return x.tolist() == [3.0 if rank < 2 else rank + 1.0] * 2 or x.tolist()


def _objects(rank, size, device):
    found = [None] * size
    dist.all_gather_object(found, {"rank": rank})
    return [item["rank"] for item in found] == list(range(size)) or found


_CASES = {
    "all_reduce": _all_reduce,
    "all_reduce_of_bf16": lambda *args: _all_reduce(*args, dtype=torch.bfloat16),
    "maximum_async": _maximum_async,
    "mean": _mean,
    "broadcast": _broadcast,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "uneven_all_to_all": _uneven_all_to_all,
    "ring": _ring,
    "scatter": _scatter,
    "reduce": _reduce,
    "subgroup": _subgroup,
    "objects": _objects,
}


def reduce_in_fp64(rank):
    """What is said when a type is reduced that HCCL does not reduce."""
    with _group(rank) as device:
        x = torch.zeros(3, dtype=torch.float64, device=device)
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            return str(error)
        return ""


def outlive_a_peer(rank, note):
    """Write down how long the first rank waits for a second that has ended, and what it is told."""
    with _group(rank) as device:
        x = torch.ones(3, device=device)
        dist.all_reduce(x)
        if rank.rank == 1:
            os._exit(7)
        started = time.monotonic()
        text = ""
        try:
            dist.all_reduce(x)
        except RuntimeError as error:
            text = str(error)
        note.write_text(json.dumps([time.monotonic() - started, text]))
        raise SystemExit(0)


def main(arguments):
    """Five watched steps of a recipe."""
    recipe, folder, size = load_recipe(Path(arguments[0])).recipe, Path(arguments[1]), int(arguments[2])
    with Pool(size, preload=["mindspeed_train.preload"]) as pool:
        found = pool.run(watched_steps, recipe, folder, 0, 5, nproc=size, timeout_s=240)
    print(json.dumps([{**result, "seen": len(result["seen"])} for result in found]))
    return int(any(result["elsewhere"] for result in found))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
