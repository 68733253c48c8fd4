"""Every error that labkit raises by itself.

LabkitError
├── CannotSend        something reached from the function cannot travel to the ranks
├── RunInProgress     this notebook already has a run that has not ended
├── StartFailed       the nursery or a rank could not be brought up
├── RankFailed        a rank raised, exited or was killed; carries its own traceback
├── RunStalled        ranks wait for each other and will not go on
├── RunTimedOut       the run was ended because it passed `timeout_s`
├── RunDirectoryError a directory is not a readable run
└── ResultUnavailable a rank delivered no result, or one that must not be unpickled

Wrong arguments are plain ValueError and TypeError, raised before any process starts.
"""

from __future__ import annotations

import textwrap

WIDTH = 98  # characters that fit below a cell at the usual width of a notebook


def wrapped(sentence: str) -> list[str]:
    """Lines that break between words, as a page would break them anywhere."""
    return textwrap.wrap(sentence, WIDTH, break_on_hyphens=False)


class LabkitError(Exception):
    """What can go wrong with a run, as opposed to with its arguments."""


class CannotSend(LabkitError):
    """An object reached from the function cannot be pickled for the ranks."""


class RunInProgress(LabkitError):
    """A second launch was asked for while one runs in this notebook."""


class StartFailed(LabkitError):
    """The nursery did not come up, or ended while it was needed."""


class RunDirectoryError(LabkitError):
    """A path is not a run directory, or cannot be read."""


class ResultUnavailable(LabkitError):
    """A rank's return value is not there, or must not be unpickled here."""


class RunTimedOut(LabkitError):
    """The run passed its `timeout_s` and was ended."""


class RunStalled(LabkitError):
    """Ranks wait for each other, or do nothing, and the run was ended.

    Attributes:
        verdict: what each rank called or did that the others did not.
        table: a line per rank: step, last collective, line of code.
    """

    def __init__(self, verdict: str, table: str) -> None:
        super().__init__(verdict)
        self.verdict = verdict
        self.table = table

    def __str__(self) -> str:
        return f"{self.table}\n\n{self.verdict}"

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the kernel's own frames."""
        return [*self.table.splitlines(), "", *wrapped(self.verdict)]


class RankFailed(LabkitError):
    """A rank failed. The rank's own traceback leads; labkit's frames are left out.

    Attributes:
        rank: the rank that failed first.
        step: the last step that this rank logged, or None before its first log.
        rank_traceback: the traceback as text, empty when the process just ended.
        verdict: one sentence that says what happened to which rank.
    """

    def __init__(
        self, verdict: str, rank: int, step: int | None = None, rank_traceback: str = ""
    ) -> None:
        super().__init__(verdict)
        self.verdict = verdict
        self.rank = rank
        self.step = step
        self.rank_traceback = rank_traceback

    def __str__(self) -> str:
        return f"{self.rank_traceback.rstrip()}\n\n{self.verdict}".strip()

    def _render_traceback_(self) -> list[str]:
        """What IPython shows instead of the kernel's own frames."""
        own = self.rank_traceback.rstrip().splitlines()
        return [*own, *([""] if own else []), *wrapped(self.verdict)]
