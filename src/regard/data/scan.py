"""The first look at training data: how much there is, what it looks like, which features occur."""

from __future__ import annotations

from random import Random

from regard.data.account import Account
from regard.data.source import Source
from regard.data.split import Splitter
from regard.errors import UserError
from regard.text.codec import split_features
from regard.text.example import Example

SAMPLE = 10_000  # examples looked at, drawn from all; taking every nth would fall for patterns in the file
CUT = 1_000  # characters looked at of each
LABELS = 10_000
FEATURES = 50_000  # distinct ones; more are no features


class Scan:
    """What one pass over the training data tells."""

    def __init__(
        self, source: Source, separator: str, strict: bool, splitter: Splitter | None, labelled: bool = False
    ) -> None:
        self.account = Account(strict)
        self.sample: list[Example] = []
        self.held_out = 0
        self.labels: set[str] = set()  # the different targets, where those are labels
        features: set[str] = set()
        fields: set[str] = set()
        random = Random(0)
        for index, (number, example) in enumerate(source.read(self.account)):
            if index < SAMPLE:
                self.sample.append(_short(example))
            elif (chance := int(random.random() * (index + 1))) < SAMPLE:  # every example is as likely as any other
                self.sample[chance] = _short(example)
            if splitter is not None:
                splitter.see(example.source)
            if labelled:
                self.labels.add(example.target or "")
                if len(self.labels) > LABELS:
                    raise UserError(
                        f"{source.place(number)}: more than {LABELS:,} different labels so far; are the columns in "
                        f"this order: {','.join(source.columns)}?"
                    )
            if example.features and example.features not in fields:
                names = split_features(example.features, separator)
                features.update(names)
                if len(features) > FEATURES:
                    raise UserError(
                        f"{source.place(number)}: more than {FEATURES:,} different features so far; "
                        f"are the columns in this order: {','.join(source.columns)}?"
                    )
                if len(fields) < FEATURES:
                    fields.add(example.features)
        source.require(self.account)
        self.features = tuple(sorted(features))
        if splitter is not None:
            self.held_out = splitter.choose()


def _short(example: Example) -> Example:
    return Example(example.source[:CUT], (example.target or "")[:CUT])
