"""Where do a model's weights come from, by name?

From the safetensors files of a Hugging Face directory, one file or several under an index; or from a seed, on the CPU
(tests) or at the speed of the device that they are for (real sizes). One tensor is read at a time, so that loading
needs no second copy of the model.
"""

from __future__ import annotations

import json
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from engine.errors import ModelError

INDEX_FILE = "model.safetensors.index.json"


class WeightSource(Protocol):
    """Tensors by their Hugging Face names."""

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor, on a device and of a dtype of the source's choice. ModelError when it is missing or of another
        shape.
        """
        ...


class RandomWeights:
    """Weights drawn from a seed and the tensor's name: norms near one, biases small, matrices normal with deviation
    `std`.

    The same seed gives the same tensor whatever else is drawn, and in which order.
    """

    def __init__(self, seed: int, std: float = 0.05) -> None:
        self.seed = seed
        self.std = std

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        generator = torch.Generator().manual_seed(_tensor_seed(self.seed, name))
        noise = torch.randn(shape, generator=generator) * self.std
        return noise + 1.0 if len(shape) == 1 and name.endswith("norm.weight") else noise


class DummyWeights:
    """Weights that stand in for a trained model's where only their size matters, drawn on the device itself.

    Norms are one, biases zero, embeddings and matrices normal: a matrix keeps the deviation of what it multiplies, and
    those that add to the residual stream are the smaller the more layers there are, so that bfloat16 activations stay
    finite at any depth. The same seed gives the same tensor on the same kind of device, whatever else is drawn.
    """

    def __init__(self, seed: int, num_layers: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed = seed
        self.num_layers = num_layers
        self.dtype = dtype
        self.device = device

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            value = 1.0 if name.endswith("norm.weight") else 0.0
            return torch.full(shape, value, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(_tensor_seed(self.seed, name))
        noise = torch.empty(shape, dtype=self.dtype, device=self.device)
        if "embed" in name:
            return noise.normal_(generator=generator)
        std = float(shape[-1]) ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            std *= (2.0 * self.num_layers) ** -0.5
        return noise.normal_(std=std, generator=generator)


class SafetensorsWeights:
    """The safetensors files of a model directory; a context manager that keeps them mapped while open."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory)
        self._stack = ExitStack()
        self._files: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        try:
            self._open_all()
        except BaseException:
            self._stack.close()
            raise

    def _open_all(self) -> None:
        index = self.directory / INDEX_FILE
        if index.is_file():
            try:
                self._file_of = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
            except (ValueError, KeyError, TypeError) as error:
                raise ModelError(f"{index}: not a safetensors index: {error}") from error
            names = sorted(set(self._file_of.values()))
        else:
            names = sorted(path.name for path in self.directory.glob("*.safetensors"))
            if not names:
                raise ModelError(f"{self.directory}: no safetensors file")
        for name in names:
            try:
                file = self._stack.enter_context(safe_open(self.directory / name, framework="pt", device="cpu"))
            except (OSError, SafetensorError) as error:
                raise ModelError(f"{self.directory / name}: cannot be read: {error}") from error
            self._files[name] = file
            if not index.is_file():
                self._file_of.update(dict.fromkeys(file.keys(), name))

    def __enter__(self) -> SafetensorsWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.clear()
        self._stack.close()

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        file = self._file_of.get(name)
        if file is None:
            raise ModelError(f"{self.directory}: weight {name} is missing")
        try:
            tensor = self._files[file].get_tensor(name)
        except SafetensorError as error:
            raise ModelError(f"{self.directory / file}: weight {name} cannot be read: {error}") from error
        return _checked(name, tensor, shape)


def _tensor_seed(seed: int, name: str) -> int:
    """A seed for one tensor. A stable hash of the name: Python's own differs from process to process."""
    return seed * 2**31 + int.from_bytes(name.encode(), "little") % (2**31 - 1)


def _checked(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if tuple(tensor.shape) != shape:
        raise ModelError(f"weight {name} has shape {tuple(tensor.shape)}, the configuration says {shape}")
    return tensor
