"""The tensors of a checkpoint of full weights: each rank writes and reads its own shards.

checkpoints/step_000030.pt is then small. It holds the tensors' shapes, and bytes and CRC32 of every file of the folder
step_000030.shards beside it. It is written last: shards without it are no checkpoint. torch.distributed.checkpoint
(DCP) writes and reads the shards as safetensors, for any number of ranks; a file's header says which part of each
tensor it has. DCP has no checksums. A LoRA is small and stays in one file.
"""

import shutil
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

from common.distributed import gather_objects, on_rank_0
from common.errors import NothingBegun, RunError, reason
from common.files import checkpoint_step, load_checkpoint, saved_checkpoints, shards_of, sync, writing
from common.models import Family
from common.process import print_message
from common.weights.policy import Optimizers, check_same_tensors, follow, local_tensors

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, WriteItem
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.distributed.fsdp import FSDPModule
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FILE_BYTES = 1 << 32  # of whole tensors in the ranks' files of one number: DCP makes up a file in memory
AT_ONCE = 1 << 24  # bytes


# ---- the tensors -----------------------------------------------------------------------------------------------------
def kind_of(policy: str) -> str:
    """How the names of the moments of a policy's optimizer begin."""
    return "optimizer" if policy == "default" else f"optimizer of {policy}"


def own_tensors(model: Family, optimizers: Optimizers) -> dict[str, torch.Tensor]:
    """{name: this rank's shard} of every policy that training changes, and of the moments of these optimizers.

    They share the memory of the model and the optimizers. An optimizer without moments gets them, zeros. A collective.
    """
    tensors: dict[str, torch.Tensor] = {}
    for name, transformer in model.policies.items():
        if isinstance(transformer, FSDPModule):
            transformer.reshard()  # a forward pass without a backward leaves the root's weights unsharded
        if name not in model.frozen_policies:
            tensors |= {f"policies/{name}/{key}": tensor for key, tensor in local_tensors(model, name).items()}
    for name, optimizer in optimizers.items():
        state: Any = get_optimizer_state_dict(model.policies[name], optimizer)["state"]  # {name: {moment: tensor}}
        for key, moments in state.items():
            tensors |= {f"{kind_of(name)}/{key}/{moment}": tensor for moment, tensor in moments.items()}
    return {name: tensor.detach() for name, tensor in tensors.items()}


def outline(tensors: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    """{policy: {name: a tensor of the shape, of one number}}: what a checkpoint's own file has in place of weights."""
    policies: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in tensors.items():
        kind, policy, key = name.split("/", 2)  # "optimizer/<parameter>/<moment>" has as many parts
        if kind == "policies":
            policies.setdefault(policy, {})[key] = torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
    return policies


# ---- moments of 8 bits -----------------------------------------------------------------------------------------------
# A checkpoint holds the fp32 numbers that they stand for: it fits any number of ranks, and AdamW of 32 bits as well.
# Quantising them again gives the same moments to the bit, on as many ranks (common/weights/adam_8bit.py).
def is_quantised(shard: torch.Tensor) -> bool:
    """Whether it is torchao's tensor: a rank's shard is a plain one otherwise."""
    return is_traceable_wrapper_subclass(shard)


class SavePlanner(DefaultSavePlanner):
    """DCP's planner, which writes quantised moments as fp32; one tensor at a time is made."""

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:
        """The shard as it is written."""
        shard = super().transform_object(write_item, object)
        return shard.dequantize() if is_quantised(shard) else shard


class LoadPlanner(DefaultLoadPlanner):
    """DCP's planner, which quantises moments again; they are fp32 until the last part of a shard is read."""

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """Count the parts of each shard."""
        self.parts_left = Counter(item.dest_index.fqn for item in new_plan.items)
        self.fp32: dict[str, torch.Tensor] = {}
        return super().finish_plan(new_plan)

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The tensor that a part of a shard is read into."""
        shard = super().lookup_tensor(index)
        if not is_quantised(shard):
            return shard
        if index.fqn not in self.fp32:
            self.fp32[index.fqn] = torch.empty(shard.shape, device=shard.device)
        return self.fp32[index.fqn]

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Quantise the shard, if this part was its last."""
        index = read_item.dest_index
        self.parts_left[index.fqn] -= 1
        if index.fqn in self.fp32 and not self.parts_left[index.fqn]:
            super().lookup_tensor(index).copy_(self.fp32.pop(index.fqn))


# ---- writing ---------------------------------------------------------------------------------------------------------
def save_shards(path: Path, model: Family, optimizers: Optimizers) -> dict[str, Any]:
    """Write the tensors beside the checkpoint `path`, which does not exist yet. A collective.

    Returns what the checkpoint's own file has of them: {"policies": their outline, "optimizer": {"names": the tensors
    of the moments}, "shards": {file: [bytes, CRC32]}}.

    Raises:
        RunError: the disk is full or fails in another way; nothing stays in the folder.
    """
    tensors = own_tensors(model, {name: optimizer for name, optimizer in optimizers.items() if optimizer.state})
    folder = shards_of(path)
    with writing(folder):
        if on_rank_0():
            shutil.rmtree(folder, ignore_errors=True)  # of a save that was killed
            folder.mkdir(parents=True)
        dist.barrier()
        writer = HuggingFaceStorageWriter(str(folder), file_numbers(tensors), save_distributed=True)
        try:
            dcp.save(tensors, storage_writer=writer, planner=SavePlanner())  # each file is on disk when this returns
            sums = {}
            for file in sorted(folder.glob(f"shard-{dist.get_rank() + 1:05d}-*")):
                with writing(file), safe_open(file, framework="pt"):  # before an older checkpoint goes: it can be read
                    sums[f"{folder.name}/{file.name}"] = [file.stat().st_size, crc32(file)]
            sync(folder)
        except (RunError, CheckpointException) as error:
            shutil.rmtree(folder, ignore_errors=True)
            if isinstance(error, RunError):
                raise
            fault = next(iter(error.failures.values()))[0]
            raise RunError(f"{folder} could not be written ({reason(fault)})") from error
    names = [name for name in tensors if not name.startswith("policies/")]
    shards = {name: known for of_rank in gather_objects(sums) for name, known in of_rank.items()}
    return {"policies": outline(tensors), "optimizer": {"names": names}, "shards": shards}


def file_numbers(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """{name: number of the file that has a rank's shard of the tensor}, from 1; a number has about FILE_BYTES."""
    numbers = {}
    num_bytes = 0
    for name, tensor in tensors.items():
        numbers[name] = 1 + num_bytes // FILE_BYTES
        num_bytes += tensor.numel() * tensor.element_size()
    return numbers


def crc32(file: Path) -> int:
    """The CRC32 of a file, as it is read back."""
    checksum = 0
    with open(file, "rb") as opened:
        while part := opened.read(AT_ONCE):
            checksum = zlib.crc32(part, checksum)
    return checksum


# ---- reading ---------------------------------------------------------------------------------------------------------
def first_intact(path: Path, state: dict, may_be_earlier: bool) -> tuple[Path, dict]:
    """The checkpoint `path` and its state or, where a file of its shards is damaged, the newest intact one before it.

    A line names each damaged file. The ranks read the files together: a collective.

    Raises:
        NothingBegun: there is none, or it may not be an earlier one.
    """
    while fault := find_fault(path, state["shards"]):
        earlier = gather_objects(newest_before(path))[0] if may_be_earlier else None
        if earlier is None:
            raise NothingBegun(f"no checkpoint to resume from: {fault}")
        print_message(f"{fault}: using {earlier.name}")
        path = earlier
        state = load_checkpoint(earlier)
    return path, state


def newest_before(path: Path) -> Path | None:
    """The newest whole checkpoint with shards, of the same run and of an earlier step."""
    for candidate in saved_checkpoints(path.parents[1])[::-1]:
        if checkpoint_step(candidate) < checkpoint_step(path):
            try:
                if "shards" in load_checkpoint(candidate):
                    return candidate
            except ValueError as error:
                print_message(str(error))
    return None


def find_fault(path: Path, shards: dict[str, list[int]]) -> str | None:
    """The fault of a file of a checkpoint's shards: another CRC32, or it cannot be read; or None. A collective."""
    fault = None
    for name in sorted(shards)[dist.get_rank() :: dist.get_world_size()]:
        try:
            if crc32(path.parent / name) != shards[name][1]:
                fault = f"{path} is not a whole checkpoint (bad CRC32 of {name})"
        except OSError as error:
            fault = f"{path} is not a whole checkpoint ({name}: {reason(error)})"
    return next((each for each in gather_objects(fault) if each), None)


def load_shards(state: dict, model: Family, optimizers: Optimizers) -> None:
    """Read the tensors of a checkpoint into the model and the optimizers, each rank its own. A collective.

    A policy that the saved run did not have begins as its trained policy.

    Raises:
        NothingBegun: naming a tensor that differs from the checkpoint's.
    """
    saved = state["policies"]
    for name in model.policies:
        if name in saved:
            check_same_tensors(name, local_tensors(model, name), saved[name])
    moments = set(state["optimizer"]["names"])
    kinds = {moment.partition("/")[0] for moment in moments}
    saved_optimizers = {name: optimizer for name, optimizer in optimizers.items() if kind_of(name) in kinds}
    tensors = own_tensors(model, saved_optimizers)
    known = {}
    for name, tensor in tensors.items():
        kind, policy, _ = name.split("/", 2)
        if name in moments or (kind == "policies" and policy in saved):
            known[name] = tensor
    reader = HuggingFaceStorageReader(str(shards_of(state["path"])))
    dcp.load(known, storage_reader=reader, planner=LoadPlanner())
    for policy, optimizer in saved_optimizers.items():
        for name, parameter in model.policies[policy].named_parameters():
            if not any(moment.startswith(f"{kind_of(policy)}/{name}/") for moment in moments):
                optimizer.state.pop(parameter, None)  # a last block may feed nothing, and has no moments
    for name in model.policies:
        if name not in saved and name not in model.frozen_policies:
            follow(model, name, 0.0)
