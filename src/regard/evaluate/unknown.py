"""What a run does not know in examples: tokens of their sources and targets, or labels."""

from __future__ import annotations

from collections.abc import Sequence

from regard.run import Run
from regard.text.codec import Example, UnknownTokens


class UnknownParts:
    """Counts what a run does not know in examples: tokens of the source, and of the target, or labels."""

    def __init__(self, run: Run, examples: Sequence[Example] = (), labels: Sequence[str] = ()) -> None:
        self.codec = run.codec
        self.labels = set(run.label_names) if run.task.labels else None
        self.source, self.target = UnknownTokens(), UnknownTokens()
        if examples:
            self.note(examples)
        self._note_labels(labels)

    def note(self, examples: Sequence[Example]) -> None:
        """Count what is unknown in these."""
        self.codec.note_unknown(examples, self.source)
        targets = [example.target or "" for example in examples]
        if self.labels is None:
            self.target.add(self.codec.target, targets, self.codec.target.encode(targets))
        else:
            self._note_labels(targets)

    def _note_labels(self, labels: Sequence[str]) -> None:
        for label in labels:
            if label not in (self.labels or ()):
                self.target.count([label])

    def remarks(self) -> list[str]:
        """One remark for each side that has something unknown."""
        remarks = [f"source: {self.source.summary()}"] if self.source else []
        if self.target and self.labels is None:
            remarks.append(f"target: {self.target.summary()}")
        elif self.target:
            remarks.append(f"target: {self.target.summary(what='label')}; none of these can be right")
        return remarks

    def to_json(self) -> dict[str, int]:
        """How many tokens or labels are unknown, by side."""
        sides = {"source": self.source, "target": self.target}
        return {side: unknown.total for side, unknown in sides.items() if unknown}
