from __future__ import annotations

from regard.presets import PRESETS
from regard.recipe import Train
from regard.training.fit import choose_preset, choose_workers


def test_more_data_never_means_a_smaller_model() -> None:
    order = ["transformer-tiny", "transformer-small", "transformer-base"]
    for device in ("cpu", "cuda"):
        sizes = [order.index(choose_preset(n, 20 * n, device).value) for n in (1, 500, 10**4, 10**5, 10**7)]
        assert sizes == sorted(sizes)
    assert set(order) <= set(PRESETS)
    assert choose_preset(10**6, 10**7, "cuda").value == "transformer-base"
    assert "8,000 training examples" in choose_preset(8000, 120_000, "cpu").reason


def test_processes() -> None:
    def workers(
        train: Train, device: str = "cpu", cores: int = 4, examples: int = 8000, rows: int = 80, length: int = 10
    ) -> str:
        return choose_workers(train, device, cores, examples, rows, rows * length).value

    assert workers(Train()) == "4"
    assert workers(Train(workers=3), cores=1) == "3"
    assert workers(Train(), device="cuda") == "1"
    assert workers(Train(), cores=1) == "1"
    assert workers(Train(), examples=500) == "1"
    assert workers(Train(steps=50)) == "1"
    assert workers(Train(minutes=0.1)) == "1"
    assert workers(Train(), rows=16) == "2"
    assert workers(Train(), rows=1) == "1"
    assert workers(Train(), rows=16, length=64) == "4"  # few rows, but long ones
    assert workers(Train(), rows=3, length=1000) == "3"
