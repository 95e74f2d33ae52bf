"""Choice of a checkpoint: which steps are complete, the newest, the best, the one to restore.

What later runs have skipped ranks below all else. Saves may go on meanwhile and remove what a look
has found; then it looks again.

Covers: steps on disk, their order, falling back to an older one.
Does not: read one step (ps.checkpoint.reader) or its values (ps.checkpoint.restore), import numba.
Threads: none; every function is independent.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from ps.checkpoint.format import Checkpoint, step_of
from ps.checkpoint.reader import Root, SeenSteps, load_chain
from ps.checkpoint.restore import check_same_model, verified
from ps.checkpoint.score import Score
from ps.checkpoint.storage import Storage, if_sound, storage_at
from ps.errors import CheckpointError
from ps.manifest.manifest import Manifest
from rpc.field_texts import with_field_texts

_logger = logging.getLogger(__name__)

MAX_PASSED_OVER = 1000
"""Most steps of a server's answer."""
MAX_LOOKS = 4
"""Most looks at the steps; each time the newest one was replaced before its files were read."""
Found = TypeVar("Found")


@with_field_texts
@dataclass(frozen=True, slots=True, kw_only=True)
class RestoreOptions:
    """Options of a restore."""

    manifest: Manifest | None = None
    """The manifest to restore for; None: the saved one. Settings of a rule may differ from the
    saved ones, parameters and rules may not."""
    reset_optimizer: bool = False
    """Restore the values only: slots and steps are reset, and the rules may differ."""
    strict: bool = False
    """Fail if the newest step is damaged, instead of taking the newest one that is whole. A step
    that a later run has skipped is not the newest, whatever its number."""
    job: str | None = None
    """Restore only checkpoints of this job; None: of any job."""


AS_SAVED = RestoreOptions()


def steps_on_disk(storage: Storage) -> list[int]:
    """Return the steps that have a directory, newest first; they need not be complete."""
    try:
        names = storage.names()
    except OSError as error:
        raise CheckpointError(f"{storage.where()} cannot be listed: {error}") from error
    steps = (step_of(name) for name in names)
    return sorted((step for step in steps if step is not None), reverse=True)


def complete_chains(
    storage: Storage, *, is_told: bool = True, strict: bool = False, seen: SeenSteps | None = None
) -> Iterator[list[Checkpoint]]:
    """Yield the chain of each complete step, newest first; log why others are incomplete.

    A step that a later run has skipped ranks after all others, whatever its number.

    Args:
        storage: the checkpoint root.
        is_told: False: log nothing; another look that does will follow.
        strict: raise why the next one is incomplete, instead of going on to an older one.
        seen: what this look has read so far; gets what is read here.

    Raises:
        CheckpointError: the file system gives no answer about a step, which may be complete.
    """
    steps = steps_on_disk(storage)
    seen = seen or SeenSteps(storage)
    passed_over = passed_over_by(seen.readable(steps))
    for step in sorted(steps, key=lambda step: (step in passed_over, -step)):
        on_damage = _on_damage(storage, step, is_told=is_told, strict=strict)
        chain = if_sound(functools.partial(load_chain, storage, step, seen), on_damage)
        if chain is not None:
            yield chain


def passed_over_by(checkpoints: Iterable[Checkpoint]) -> set[int]:
    """Return the steps that these checkpoints name as skipped by their runs."""
    return {step for checkpoint in checkpoints for step in checkpoint.passed_over}


def best_first(checkpoints: Iterable[Checkpoint]) -> list[Checkpoint]:
    """Return those with a score, of each kind of score the best first; of equal ones the older.

    Those that a later run has skipped are left out.

    Args:
        checkpoints: all that can be read, so that what runs have skipped is known.
    """
    known = list(checkpoints)
    skipped = passed_over_by(known)

    scored = [(each.score, each) for each in known if each.score and each.step not in skipped]

    def order(pair: tuple[Score, Checkpoint]) -> tuple[str, bool, float, int]:
        score, checkpoint = pair
        signed = -score.value if score.higher_is_better else score.value
        return *score.kind, signed, checkpoint.step

    return [checkpoint for _, checkpoint in sorted(scored, key=order)]


def best(
    root: Root, metric: str, *, higher_is_better: bool, up_to: int | None = None
) -> Checkpoint | None:
    """Return the complete checkpoint with the best score of a metric; None: there is none.

    Args:
        root: the checkpoint root.
        metric: its name.
        higher_is_better: the kind of score.
        up_to: the last step of the run; None: all count.

    Raises:
        CheckpointError: the directory cannot be listed, or a manifest in it cannot be read now.
    """
    storage = storage_at(root)
    seen = SeenSteps(storage)
    for each in best_first(seen.readable(steps_on_disk(storage))):
        is_in_run = up_to is None or each.step <= up_to
        if is_in_run and each.score and each.score.kind == (metric, higher_is_better):
            chain = if_sound(
                functools.partial(load_chain, storage, each.step, seen),
                functools.partial(_log_skipped, storage, each.step),
            )
            if chain is not None:
                return chain[0]
    return None


def steps_after(root: Root, checkpoint: Checkpoint) -> tuple[int, ...]:
    """Return the steps that a run skips when it resumes from this checkpoint.

    Those with a greater number, the greatest MAX_PASSED_OVER at most, and those skipped before.

    Args:
        root: the checkpoint root.
        checkpoint: the one to resume from.
    """
    newer = {step for step in steps_on_disk(storage_at(root)) if step > checkpoint.step}
    return tuple(sorted(newer | {*checkpoint.passed_over})[-MAX_PASSED_OVER:])


def latest(root: Root, *, is_told: bool = True) -> int | None:
    """Return the newest complete step, or None.

    Args:
        root: the checkpoint root.
        is_told: see `complete_chains`.
    """
    chain = next(complete_chains(storage_at(root), is_told=is_told), None)
    return None if chain is None else chain[0].step


def read_manifest(root: Root, step: int | None = None) -> Checkpoint:
    """Return the manifest of a step, or of the newest complete one.

    Args:
        root: the checkpoint root.
        step: number of the step; None: the newest complete one.

    Raises:
        CheckpointError: the step is missing or incomplete (the message names the newest complete
            one), or no step is complete.
    """
    storage = storage_at(root)
    if step is None:
        chain = next(complete_chains(storage), None)
        if chain is None:
            raise _none_complete(storage)
        return chain[0]
    try:
        return load_chain(storage, step)[0]
    except CheckpointError as error:
        raise CheckpointError(f"{error}; {_newest_text(storage)}") from error


def _newest_text(storage: Storage) -> str:
    try:
        newest = latest(storage)
    except CheckpointError as error:
        return str(error)
    return "none is complete" if newest is None else f"newest complete step is {newest}"


def _none_complete(storage: Storage) -> CheckpointError:
    """Return the error for a root without a usable checkpoint."""
    seen = ", ".join(map(str, steps_on_disk(storage))) or "none"
    return CheckpointError(f"no complete checkpoint in {storage.where()}; steps on disk: {seen}")


def _on_damage(
    storage: Storage, step: int, *, is_told: bool, strict: bool
) -> Callable[[CheckpointError], None] | None:
    """Return what becomes of the error of a step that is not sound; see `complete_chains`."""
    if strict:
        return _raise
    return functools.partial(_log_skipped, storage, step) if is_told else None


def _raise(error: CheckpointError) -> None:
    raise error


def _log_skipped(storage: Storage, step: int, error: CheckpointError) -> None:
    """Log why a checkpoint is skipped.

    Args:
        storage: the checkpoint root.
        step: number of the step.
        error: what is wrong with it.
    """
    _logger.warning("checkpoint step %d in %s is skipped: %s", step, storage.where(), error)


def find(root: Root, step: int | None, like: RestoreOptions) -> tuple[Checkpoint, Manifest]:
    """Return the checkpoint to restore, and the manifest to restore it for.

    Args:
        root: the checkpoint root.
        step: number of the step; None: the newest one that can be restored.
        like: what the checkpoint has to fit.

    Raises:
        CheckpointError: there is none, or the requested one is damaged or of another model.
    """
    if step is None:
        found = newest_sound(root, strict=like.strict, job=like.job)
    else:
        found = read_manifest(root, step)
    return found, _check_fits(found, like)


def check_restorable(root: Root, step: int | None, like: RestoreOptions) -> int:
    """Refuse what `find` refuses, as far as that is seen without reading values; those may be many.

    Returns the step that `find` would return if no value is damaged.

    Args:
        root: see `find`.
        step: see `find`.
        like: see `find`.

    Raises:
        CheckpointError: there is none, or the one that `find` would return is of another model.
    """
    if step is not None:
        return find(root, step, like)[0].step
    newest = read_newest(
        root, lambda chain: chain[0], strict=like.strict, job=like.job, is_told=False
    )
    try:
        _check_fits(newest, like)
    except CheckpointError:
        return find(root, None, like)[0].step  # it may be damaged, and an older one fit
    return newest.step


def _check_fits(found: Checkpoint, like: RestoreOptions) -> Manifest:
    manifest = manifest_to_serve(found, like)
    check_same_model(found.manifest, manifest, reset_optimizer=like.reset_optimizer)
    return manifest


def manifest_to_serve(checkpoint: Checkpoint, like: RestoreOptions) -> Manifest:
    """Return what a server trains that is restored from a checkpoint.

    Without frozen groups if the checkpoint has none, as of a model that has got some since: they
    come with the next seed. Tables that name no seed keep the checkpoint's: their rows that do
    not exist yet would otherwise have other first values.

    Args:
        checkpoint: the one to restore.
        like: what was asked for.
    """
    asked = (like.manifest or checkpoint.manifest).with_seeds_of(checkpoint.manifest)
    return asked if checkpoint.manifest.frozen_groups else asked.without_frozen()


def newest_sound(root: Root, *, strict: bool = False, job: str | None = None) -> Checkpoint:
    """Return the newest checkpoint that `verified` accepts; as `read_newest`.

    Args:
        root: the checkpoint directory.
        strict: see `read_newest`.
        job: see `read_newest`.
    """
    storage = storage_at(root)
    return read_newest(root, lambda chain: verified(storage, chain)[0], strict=strict, job=job)


def restore_newest(
    root: Root, like: RestoreOptions, restore: Callable[[Sequence[Checkpoint]], Found]
) -> Found:
    """Return what `restore` makes of the newest checkpoint that is whole; as `read_newest`.

    Servers that begin together take the same one, so each reads all files first. A server that is
    started again in a running job has nobody to agree with: the others live and hold what is newer.
    So its own files alone have to be whole, and `restore` reads these.

    Args:
        root: the checkpoint directory.
        like: what it has to fit; its `job` is that of a running one.
        restore: fills a server from a chain, newest first; raises CheckpointError where it is
            damaged.

    Raises:
        CheckpointError: there is none, or the newest whole one is of another model.
    """
    storage = storage_at(root)

    def read(chain: list[Checkpoint]) -> Found | CheckpointError:
        misfit: CheckpointError | None = None
        try:
            _check_fits(chain[0], like)
        except CheckpointError as error:
            misfit = error
        if misfit is not None or like.job is None:
            verified(storage, chain)  # a damaged one of another model hides no older one
        return misfit or restore(chain)

    found = read_newest(root, read, strict=like.strict, job=like.job)
    if isinstance(found, CheckpointError):
        raise found
    return found


def read_newest(
    root: Root,
    read: Callable[[list[Checkpoint]], Found],
    *,
    strict: bool,
    job: str | None,
    is_told: bool = True,
) -> Found:
    """Return what `read` makes of the newest chain that it accepts; log why newer ones are skipped.

    A save that is committed meanwhile may remove the newest step, whose missing files are no
    damage: then it looks again, a few times. Where saves are faster than each look, the last one
    takes the newest that can be read.

    Args:
        root: the checkpoint directory.
        read: gets a chain, newest first; raises CheckpointError where it is damaged.
        strict: raise the error of the newest chain instead of reading an older one.
        job: accept only this job's checkpoints; None: any.
        is_told: False: log nothing; another look that does will follow.

    Raises:
        CheckpointError: there is none, or the file system does not give a newer one's files, or
            saves have replaced the newest one faster than it could be read.
    """
    storage = storage_at(root)
    first = steps = steps_on_disk(storage)
    failure: CheckpointError | None = None
    for looks_left in reversed(range(MAX_LOOKS)):
        look = _Look(storage, steps, is_last=not looks_left, is_told=is_told, strict=strict)
        try:
            found = look.through(read, job)
        except CheckpointError as error:
            if not look.is_overtaken():
                raise
            failure, found = error, None
        if found is not None:
            return found
        _logger.info("%s: looking again, as newer steps were saved meanwhile", storage.where())
        steps = steps_on_disk(storage)
    raise CheckpointError(
        f"{storage.where()}: the newest step was {first[0]} at first and is {steps[0]} now: each "
        "was replaced before it was read. Save less often, keep more checkpoints (keep=...), or "
        "restore when nothing saves there"
    ) from failure


@dataclass(frozen=True, slots=True)
class _Look:
    """One look at a directory in which somebody may save meanwhile."""

    storage: Storage
    steps: Sequence[int]
    """Steps on disk when it began, newest first."""
    is_last: bool
    is_told: bool
    strict: bool

    def is_overtaken(self) -> bool:
        """Whether a newer step is there by now, whose save may have removed others."""
        return steps_on_disk(self.storage)[:1] != list(self.steps[:1])

    def through(self, read: Callable[[list[Checkpoint]], Found], job: str | None) -> Found | None:
        """Read the newest chain that can be read; None: one would be taken for a newer one."""
        for chain in complete_chains(self.storage, is_told=self.is_told, strict=self.strict):
            newest = chain[0]
            if job not in (None, newest.job):
                continue
            if not self._may_take(newest):
                return None
            on_damage = _on_damage(
                self.storage, newest.step, is_told=self.is_told, strict=self.strict
            )
            found = if_sound(functools.partial(read, chain), on_damage)
            if found is None:
                continue
            if not self._may_take(newest):
                return None
            if self.is_told:
                _tell_newer(self.storage, newest.step, self.steps)
            return found
        raise _none_complete(self.storage)

    def _may_take(self, checkpoint: Checkpoint) -> bool:
        """Whether all newer ones are damaged, and none was replaced while it was read."""
        return self.is_last or [checkpoint.step] == self.steps[:1] or not self.is_overtaken()


def _tell_newer(storage: Storage, taken: int, steps: Sequence[int]) -> None:
    """Log which newer steps are skipped; they may become readable again later."""
    newer = [step for step in steps if step > taken]
    if newer:
        _logger.warning(
            "%s: step %d is restored, not step %s, which has a higher number: the training between "
            "them is left out. Checkpoints saved from now on record this, and later restores "
            "prefer them; step=%d restores the other one",
            storage.where(),
            taken,
            ", ".join(map(str, newer[:5])),
            newer[0],
        )
