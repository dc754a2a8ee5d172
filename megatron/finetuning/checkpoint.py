"""Checkpoints of fine-tuning: folders that `from_pretrained` loads, with the state from which a run resumes.

Each rank of the first replica writes the tensors of its stages into a file of its own, in the form that
`save_pretrained` would give them, and an index says which file has which tensor, as for large models on Hugging Face.
The first rank adds the tensors of the model's folder that no stage uses. If the model has an adapter, only the adapter
is written, into PEFT's single file. A folder is written under a temporary name and renamed once everything is on the
disk, so a folder named checkpoint-N is always complete. If an earlier folder has the name, it is renamed first and
removed afterwards; if the run is killed in between, the next run renames it back.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from megatron.documents.files import write_whole
from megatron.finetuning.adapters import AdapterTensors
from megatron.finetuning.assembly import BuiltPipeline
from megatron.finetuning.optimizers import take_rates
from megatron.finetuning.partition_file import KEPT_PARTITION, PartitionFile
from megatron.finetuning.pretrained import Pretrained, first_line
from megatron.pipeline.runtime.failure.agreement import agreed, gathered
from megatron.trainer.checkpoint.directory import save_with_torch, sync_directory, sync_file

_NAME = re.compile(r"checkpoint-([0-9]+)")
_PROGRESS = "progress.json"
BATCH_SIZE = "number of samples of a batch (size of a microbatch x accumulation x replicas)"
GRAPH = "graph of the model (which precision, adapter, attention and the sizes of a microbatch decide)"
STAGES = "cut into stages (which --partition, --pipeline_schedule and the devices of a replica decide)"
_INDEX = "model.safetensors.index.json"
_ASIDE = ".replaced"


@dataclass(frozen=True)
class SavedProgress:
    """The progress of a run, and the settings that a resumed run must share.

    Attributes:
        batches, microbatches: the numbers of finished batches, and of their microbatches over all replicas.
        signature: the signature of the captured graph.
        stages: a digest of the stages and their ranks.
        softened: the flags that soften staleness.
        samples, batch_size, flags, contents: compared only if the resumed run trains. `batch_size`: samples of a batch
            over all replicas, so the number of replicas may change as long as a batch stays the same. `flags`: their
            values. `contents`: the states of the files that flags name. Flags that this checkpoint lacks, since an
            earlier version wrote it, or that this rank does not compare, are left out.
        best: the state of `Best`; None if the run has none.
        freezing: the state of `Freezer`; None if no layers freeze.
        owes_evaluation: an evaluation was due here, and a stop request left it out.
    """

    batches: int
    microbatches: int
    signature: str
    stages: str
    schedule: str
    seed: int
    optim: str
    softened: str
    samples: int | None
    batch_size: int | None
    flags: dict[str, Any]
    best: dict[str, Any] | None = None
    freezing: dict[str, Any] | None = None
    owes_evaluation: bool = False
    contents: dict[str, str | None] = field(default_factory=dict)

    @staticmethod
    def read(folder: Path) -> SavedProgress:
        """The progress in a checkpoint's folder. Raises ValueError if it cannot be read."""
        try:
            return SavedProgress(**json.loads((folder / _PROGRESS).read_text(encoding="utf-8")))
        except (OSError, json.JSONDecodeError, TypeError) as error:
            raise ValueError(f"{folder} is no checkpoint to go on from ({error}); give a checkpoint-N") from error

    def require_same(self, other: SavedProgress, folder: Path, *, trains: bool) -> None:
        """Check that a run with the settings `other` can resume from `folder`, from which this progress was read.

        `trains`: whether the resumed run trains. Raises ValueError naming the first setting that differs.
        """
        pairs = [(GRAPH, self.signature[:8], other.signature[:8])] if self.signature != other.signature else []
        pairs.append((STAGES, self.stages, other.stages))
        names = ("schedule", "seed", "optim", "softened")
        pairs += [(name, getattr(self, name), getattr(other, name)) for name in names]
        if trains:
            pairs.append(("number of samples", self.samples, other.samples))
            pairs.append((BATCH_SIZE, self.batch_size, other.batch_size))
            for saved, own in ((self.flags, other.flags), (self.contents, other.contents)):
                pairs += [(f"--{name}", saved[name], value) for name, value in own.items() if name in saved]
        for name, its, wanted in pairs:
            if its != wanted:
                raise ValueError(
                    f"{folder} was made with another {name} ({its}) than this run's ({wanted}); give the flags, the "
                    "data and the partition that it was made with"
                )


def latest(output_dir: Path) -> Path | None:
    """The complete checkpoint with the most batches, or None if the folder has no checkpoint."""
    found = _checkpoints(output_dir)
    return found[-1] if found else None


def _checkpoints(output_dir: Path) -> list[Path]:
    if not output_dir.is_dir():
        return []
    return sorted((folder for folder in output_dir.iterdir() if _NAME.fullmatch(folder.name)), key=_num_batches)


def _num_batches(folder: Path) -> int:
    return int(_NAME.fullmatch(folder.name)[1])


@dataclass(frozen=True)
class CheckpointOrigin:
    """The source of everything in a written folder that is not a tensor of a stage.

    Attributes:
        source: the folder of the model, and which of the tensors are written, in which form.
        used: the names of the tensors of all stages.
        save_rest: writes configuration and processor into a folder; called on rank 0.
        partition: the partition with which a run without --partition resumes; None: it follows from the flags.
    """

    source: Pretrained | AdapterTensors
    used: frozenset[str]
    save_rest: Callable[[Path], None]
    partition: PartitionFile | None = None


def save(
    pipeline: BuiltPipeline, folder: Path, origin: CheckpointOrigin, progress: SavedProgress, *,
    before_commit: Callable[[], None] = lambda: None,
) -> None:  # fmt: skip
    """Write the newest weights, and the state from which a run resumes, as `folder`.

    `before_commit`: called on the first rank when all has been written, before the folder gets its name.

    Collective: every rank must call it. Precondition: the pipeline is drained. Raises ValueError on all ranks if any
    rank cannot write.
    """
    output_dir, (folder, partial) = folder.parent, places(folder)
    with all_write(folder):
        if torch.distributed.get_rank() == 0:
            drop_unfinished(output_dir)
    _write(pipeline, partial, origin, progress)
    with all_write(folder):
        if torch.distributed.get_rank() == 0:
            before_commit()
            replace_folder(folder, partial)


def save_model(pipeline: BuiltPipeline, folder: Path, origin: CheckpointOrigin) -> None:
    """Write the newest weights into `folder`, which may have other files.

    The files of tensors have names with a random part, so an earlier model in the folder stays complete until the last
    renames: configuration and tokenizer, then the index.

    Collective: every rank must call it. Precondition: the pipeline is drained. Raises ValueError on all ranks if any
    rank cannot write.
    """
    partial = folder / ".model.partial"
    _write(pipeline, partial, origin, None)
    with all_write(folder):
        if torch.distributed.get_rank() == 0:
            names = sorted((path.name for path in partial.iterdir()), key=lambda name: name == _INDEX)
            for name in names:
                (partial / name).rename(folder / name)
            sync_directory(folder)
            partial.rmdir()
            for path in folder.glob("model*.safetensors") if _INDEX in names else ():
                if path.name not in names:
                    path.unlink()


@contextmanager
def all_write(folder: Path) -> Iterator[None]:
    """Run a block that writes files on each rank; at its end all ranks have written.

    Collective: every rank must enter it. The block itself must have no collectives. Raises ValueError on all ranks if
    any rank cannot write.
    """
    with agreed():
        try:
            yield
        except (OSError, RuntimeError, SafetensorError) as error:
            reason = getattr(error, "strerror", None) or first_line(error)
            raise ValueError(
                f"{folder} cannot be written by rank {torch.distributed.get_rank()}: {reason}; make room, or give "
                "another --output_dir"
            ) from error


def _write(pipeline: BuiltPipeline, partial: Path, origin: CheckpointOrigin, progress: SavedProgress | None) -> None:
    """Write all files into the folder `partial`; with a `progress`, also the state of the run.

    Collective: every rank must call it. Raises ValueError on all ranks if any rank cannot write; then nothing is left
    of the folder, whose files may have filled the disk.
    """
    try:
        _write_files(pipeline, partial, origin, progress)
    except ValueError:  # all ranks raise it, and none writes any longer
        if torch.distributed.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _write_files(
    pipeline: BuiltPipeline, partial: Path, origin: CheckpointOrigin, progress: SavedProgress | None
) -> None:
    rank, writers, writes = torch.distributed.get_rank(), pipeline.schedule.num_ranks, pipeline.is_first
    token = [secrets.token_hex(4)]
    torch.distributed.broadcast_object_list(token)
    one = origin.source.file_name  # name of the only file, which one rank writes
    files = [one or f"model-{number:05d}-of-{writers:05d}-{token[0]}.safetensors" for number in range(1, writers + 1)]
    own = _newest(pipeline, origin.source.writes) if writes else {}
    with all_write(partial):
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir(parents=True)
            own.update(origin.source.unused(origin.used))
    own = origin.source.reverted(_reunited(own, origin.source.written_with))
    with all_write(partial):
        if own:
            save_file(own, partial / files[pipeline.place], metadata={"format": "pt"})
            sync_file(partial / files[pipeline.place])
        if progress is not None and writes:
            with open(partial / f"training-{pipeline.place}.pt", "wb") as stream:
                save_with_torch(state_of(pipeline), stream)
            sync_file(partial / f"training-{pipeline.place}.pt")
    sizes = gathered((files[pipeline.place], {name: tensor.nbytes for name, tensor in own.items()}))
    with all_write(partial):
        if rank == 0:
            if one is None:
                write_index(partial, dict(sorted((file, its) for file, its in sizes if its)))
            origin.save_rest(partial)
            if progress is not None:
                write_whole(partial / _PROGRESS, json.dumps(asdict(progress), indent=1) + "\n")
                if origin.partition is not None:
                    origin.partition.write(partial / KEPT_PARTITION)
            for path in partial.iterdir():
                sync_file(path)
            sync_directory(partial)


def write_index(folder: Path, files: Mapping[str, Mapping[str, int]]) -> None:
    """Write the index of a model. `files`: name of a file -> its tensors' names and bytes."""
    weight_map = {name: file for file, tensors in files.items() for name in tensors}
    total = {"total_size": sum(sum(tensors.values()) for tensors in files.values())}
    index = {"metadata": total, "weight_map": weight_map}
    write_whole(folder / _INDEX, json.dumps(index, indent=1, sort_keys=True) + "\n")


def places(folder: Path) -> tuple[Path, Path]:
    """The folder without links, which stay, and the folder beside it in which its content is written before."""
    folder = Path(os.path.realpath(folder))
    return folder, folder.with_name(f".{folder.name}.partial")


def _aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}{_ASIDE}")


def replace_folder(folder: Path, partial: Path) -> None:
    """Rename `partial` to `folder`, which may exist from an earlier run. Both are as `places` returns them.

    At each moment `folder` is complete, or the earlier folder is where `recover` finds it.
    """
    aside = _aside(folder)
    if folder.exists():
        shutil.rmtree(aside, ignore_errors=True)
        folder.rename(aside)
    partial.rename(folder)
    sync_directory(folder.parent)
    shutil.rmtree(aside, ignore_errors=True)


def recover(output_dir: Path) -> None:
    """Rename back the folders that a killed run had renamed to replace them. Several ranks may call it at once.

    They are those of `output_dir`, and those to which its links lead. Raises ValueError if one cannot be renamed.
    """
    names = [each.name.removeprefix(".").removesuffix(_ASIDE) for each in output_dir.glob(f".*{_ASIDE}")]
    links = [Path(os.path.realpath(each)) for each in output_dir.glob("*") if each.is_symlink()]
    for folder in (*(output_dir / name for name in names), *links):
        aside = _aside(folder)
        try:
            if aside.exists() and not folder.exists():
                aside.rename(folder)
        except FileNotFoundError:  # another rank was faster
            continue
        except OSError as error:
            raise ValueError(f"{aside} is {folder.name}, and cannot be renamed: {error.strerror}; rename it") from error


def prune(output_dir: Path, most: int | None, *, best: str | None = None) -> None:
    """Remove all but the `most` newest checkpoints; None removes nothing. Called on one rank.

    The folder named `best` stays and counts among the `most`; the newest folder stays in any case.
    """
    if most is None:
        return
    *others, newest = _checkpoints(output_dir)
    kept = {newest.name, best or newest.name}
    others = [folder for folder in others if folder.name != best]
    for old in others[: max(len(others) - max(most - len(kept), 0), 0)]:
        _remove(old)


def drop_others(output_dir: Path, *, after: int, but: Path) -> None:
    """Remove the checkpoints with more than `after` batches, except `but`. Called on one rank."""
    for other in _checkpoints(output_dir):
        if _num_batches(other) > after and other != but:
            _remove(other)


def drop_unfinished(output_dir: Path) -> None:
    """Remove the remains of checkpoints that a killed run was writing or removing. Called on one rank.

    Precondition: `recover` has renamed the folders that are to stay.
    """
    for left in output_dir.glob(".checkpoint-*"):
        _discard(left)


def _remove(folder: Path) -> None:
    """Rename a folder, then remove it, so that an interrupted removal leaves no incomplete folder under its name.

    Of a link only itself is removed: the folder to which it leads lies elsewhere, and another link may lead there, too.
    """
    if os.path.lexists(folder):
        doomed = folder.with_name(f".{folder.name}.removed")
        _discard(doomed)
        folder.rename(doomed)
        _discard(doomed)


def _discard(path: Path) -> None:
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path, ignore_errors=True)


def restore(pipeline: BuiltPipeline, folder: Path) -> None:
    """Load the weight versions, optimizers and schedulers of this rank's stages as `save` wrote them, on each replica.

    Collective: every rank must call it. Raises ValueError on all ranks if the file of any rank is missing or damaged.
    """
    path = folder / f"training-{pipeline.place}.pt"
    with agreed():
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (OSError, RuntimeError, EOFError, ValueError, pickle.UnpicklingError) as error:
            # torch's own message would advise the user to trust the file
            reason = "no state of a run" if isinstance(error, pickle.UnpicklingError) else first_line(error)
            raise ValueError(f"{path} cannot be read ({reason}); go on from another checkpoint") from error
        load_state(pipeline, state)


def load_state(pipeline: BuiltPipeline, state: Mapping[int | str, dict]) -> None:
    """Load what `state_of` has returned for the same stages."""
    pipeline.load_statistics(state["statistics"])
    for key, update in pipeline.updates.items():
        update.versions.restore(state[key]["versions"])
        update.optimizer.load_state_dict(state[key]["optimizer"])
        update.scheduler.load_state_dict(state[key]["scheduler"])
        take_rates(update.scheduler)
        if update.scales is not None:
            update.scales.scaler.load_state_dict(state[key]["scaler"])
            update.scales.load_state_dict(state[key]["scales"])


def state_of(pipeline: BuiltPipeline) -> dict[int | str, dict]:
    """The weight versions, optimizers and schedulers of this rank's stages; the tensors are not copied."""
    updates = {
        key: {
            "versions": {version: update.versions.tensors(version) for version in update.versions.live()},
            "optimizer": update.optimizer.state_dict(),
            "scheduler": update.scheduler.state_dict(),
            **({} if scales is None else {"scaler": scales.scaler.state_dict(), "scales": scales.state_dict()}),
        }
        for key, update in pipeline.updates.items()
        for scales in [update.scales]
    }
    return {"statistics": pipeline.statistics(), **updates}


def _newest(pipeline: BuiltPipeline, writes: Callable[[str], bool]) -> dict[str, Tensor]:
    """The newest tensors of this rank's stages on the CPU, by name in the model; FP32 masters in place of weights.

    `writes`: whether a tensor is wanted.
    """
    found: dict[str, Tensor] = {}
    for index, module in pipeline.modules.items():
        pipeline.versions[index].show_newest()
        found.update({name: tensor for name, tensor in module.stage.state_dict().items() if writes(name)})
    found.update({name: tensor for name, tensor in pipeline.exact.items() if name in found})
    return {name: tensor.detach().to("cpu").contiguous() for name, tensor in found.items()}


def _reunited(own: dict[str, Tensor], written_with: Callable[[str], str]) -> dict[str, Tensor]:
    """The tensors that this rank writes: a group that lies on several ranks is gathered on the lowest of these ranks.

    Collective: every rank must call it. `written_with`: name of a tensor -> name of its group of tensors.
    """
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    groups = gathered({name: written_with(name) for name in own})
    ranks: dict[str, set[int]] = {}
    for holder, names in enumerate(groups):
        for group in names.values():
            ranks.setdefault(group, set()).add(holder)
    for group, holders in sorted(ranks.items()):
        if len(holders) > 1:
            part = {name: own.pop(name) for name, its in groups[rank].items() if its == group}
            parts = [{} for _ in range(size)] if rank == min(holders) else None
            torch.distributed.gather_object(part, parts, dst=min(holders))
            for part in parts or ():
                own.update(part)
    return own
