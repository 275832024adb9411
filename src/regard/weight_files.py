"""Files of weights: reading, writing and comparing tensors by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save, save_file
from torch import Tensor, nn

from regard import files
from regard.config import Config
from regard.errors import UserError
from regard.files import open_weights
from regard.model import Model, allocate, on_meta

MAX_DIFFERENCES = 20  # in a message


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """The parameters by name; shared ones occur once, with their first name."""
    return {name: p.detach() for name, p in model.named_parameters(remove_duplicate=True)}


def write_tensors(tensors: dict[str, Tensor], path: Path) -> None:
    """Write tensors with default permissions. A failure raises OSError."""
    path.touch()
    mode = path.stat().st_mode
    try:
        save_file({name: x.detach().contiguous().cpu() for name, x in tensors.items()}, path)
    except SafetensorError as error:
        raise OSError(str(error).removeprefix("Error while serializing: ").removeprefix("I/O error: ")) from None
    path.chmod(mode)  # the library creates a file that only its owner can read


def save_weights(weights: dict[str, Tensor], path: Path) -> None:
    """Write tensors atomically. The library's own writer would leave a temporary file if it is killed."""
    tensors = {name: x.contiguous().cpu() for name, x in weights.items()}
    files.replace_file(path, lambda temporary: temporary.write_bytes(save(tensors)))


def require_layers(config: Config, tensors: int, where: str) -> None:
    """Raise UserError for a config with more layers than tensors; called before layers are created."""
    layers = sum(stack.layers for stack in config.stacks.values())
    if layers > tensors:
        message = f"missing: config.json has {layers} layers, the file only {tensors} tensors"
        raise UserError(f"{where}: weights do not fit config.json\n  {message}")


def load_weights(model: Model, path: Path, device: str | torch.device = "cpu") -> None:
    """Load weights; wrong names and shapes are reported together, before a model on the meta device is allocated."""
    with open_weights(path) as file:
        names = file.keys()
        stored = {name: list(file.get_slice(name).get_shape()) for name in names}
        require_shapes(stored, {name: list(x.shape) for name, x in weights_of(model).items()}, str(path))
        if next(model.parameters()).is_meta:
            allocate(model, device)
        with torch.no_grad():
            for name, parameter in model.named_parameters(remove_duplicate=True):
                parameter.copy_(file.get_tensor(name))


def require_shapes(
    stored: Mapping[str, list[int]], expected: Mapping[str, list[int]], where: str, other: Sequence[str] = ()
) -> None:
    """Raise UserError unless a file has the tensors of a model; all differences are listed, `other` ones first."""
    wrong = [*other, *(f"missing: {name}" for name in sorted(expected.keys() - stored.keys()))]
    wrong += [f"not known: {name} {stored[name]}" for name in sorted(stored.keys() - expected.keys())]
    for name in sorted(expected.keys() & stored.keys()):
        if stored[name] != expected[name]:
            wrong.append(f"{name}: shape {stored[name]} where config.json says {expected[name]}")
    if wrong:
        raise UserError(f"{where}: weights do not fit config.json\n  {list_differences(wrong)}")


def list_differences(lines: Sequence[str]) -> str:
    """Lines of a message, at most MAX_DIFFERENCES."""
    more = [f"and {len(lines) - MAX_DIFFERENCES} more"] if len(lines) > MAX_DIFFERENCES else []
    return "\n  ".join([*lines[:MAX_DIFFERENCES], *more])


def mean_weights(sets: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of several sets of weights, summed in double precision."""
    total: dict[str, Tensor] = {}
    count = 0
    for weights in sets:
        count += 1
        for name, x in weights.items():
            total[name] = total[name] + x.double() if name in total else x.double()
    return {name: (x / count).to(weights[name].dtype) for name, x in total.items()}


def load_model(config: Config, path: Path, device: str | torch.device = "cpu") -> Model:
    """A model with the weights of a file."""
    with open_weights(path) as file:
        require_layers(config, len(file.keys()), str(path))
    model = on_meta(config)
    load_weights(model, path, device)
    return model.eval()
