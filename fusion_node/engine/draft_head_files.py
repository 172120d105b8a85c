"""The two files of a draft head, read with bounds: what they say of themselves first, and of tensors only those wanted.

Heads are published by anybody. Nothing here runs code, follows a name out of the file, or takes memory before sizes
were checked: safetensors bounds its own header, and a tensor is read only when its shape is what was asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from fusion_node.errors import ConfigError

CONFIG_FILE = "config.json"
MAX_CONFIG_BYTES = 2**20

MAX_WEIGHT_BYTES = 16 * 2**30
"""Of a file: a head for a model of 70B parameters has 2 GiB, and as much again where its embedding comes along."""

MAX_TENSORS = 4096
"""Of a file: a published head has some fifteen per layer."""

_FLOATS = frozenset(("F64", "F32", "F16", "BF16"))
_INTEGERS = frozenset(("I64", "I32", "I16", "I8", "U8", "BOOL"))

_UNREADABLE = (OSError, SafetensorError, RuntimeError, MemoryError)
"""The last two are torch's and safetensors' where a file cannot be mapped."""


def read_config(folder: Path) -> bytes:
    """config.json of a head.

    Raises:
        ConfigError: there is none, or it is too large for one.
    """
    path = folder / CONFIG_FILE
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"{folder} holds no draft head: {CONFIG_FILE} cannot be read")
        with path.open("rb") as file:
            data = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{folder} holds no draft head: {CONFIG_FILE} cannot be read") from error
    if len(data) > MAX_CONFIG_BYTES:
        raise ConfigError(f"{path} is too large for the configuration of a draft head")
    return data


class HeadTensors:
    """The tensors of a safetensors file: their shapes at once, their values when they are asked for.

    Args:
        rename: from a name in the file to the one that it goes by here.

    Raises:
        ConfigError: the file cannot be read, is no such file, or holds a tensor twice.
    """

    def __init__(self, path: Path, rename: Callable[[str], str] = str) -> None:
        self.path = path
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self._stored: dict[str, str] = {}
        try:
            if not path.is_file():
                raise self._unreadable()
            if path.stat().st_size > MAX_WEIGHT_BYTES:
                raise ConfigError(f"{path} is larger than {MAX_WEIGHT_BYTES // 2**30} GiB: it is no draft head")
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                if len(names) > MAX_TENSORS:
                    raise ConfigError(f"{path} holds {len(names)} tensors: it is no draft head")
                for stored in names:
                    name, part = rename(stored), file.get_slice(stored)
                    if name in self.shapes:
                        raise ConfigError(f"{path} holds {name} twice")
                    self.shapes[name], self._dtypes[name] = tuple(part.get_shape()), str(part.get_dtype())
                    self._stored[name] = stored
        except _UNREADABLE as error:
            raise self._unreadable() from error

    def read(self, wanted: Mapping[str, tuple[int, ...]], *, integers: bool = False) -> dict[str, torch.Tensor]:
        """Tensors of these names and shapes: finite numbers, or whole ones.

        Raises:
            ConfigError: one is not there, or is not what is wanted.
        """
        for name, shape in wanted.items():
            if name not in self.shapes:
                raise ConfigError(f"{self.path} lacks {name}, which its {CONFIG_FILE} needs: fetch it again")
            if self.shapes[name] != shape:
                raise ConfigError(
                    f"{name} of {self.path} has the shape {self.shapes[name]}, "
                    f"but its {CONFIG_FILE} needs {shape}: fetch it again"
                )
            if self._dtypes[name] not in (_INTEGERS if integers else _FLOATS):
                raise ConfigError(f"{name} of {self.path} is of type {self._dtypes[name]}, which is not read for it")
        try:
            with safe_open(self.path, "pt") as file:
                tensors: dict[str, torch.Tensor] = {name: file.get_tensor(self._stored[name]) for name in wanted}
        except _UNREADABLE as error:
            raise self._unreadable() from error
        for name, tensor in tensors.items():
            if not torch.isfinite(tensor).all():
                raise ConfigError(f"{name} of {self.path} is not finite: fetch it again")
        return tensors

    def token_ids(self, size: int, vocabulary: int) -> torch.Tensor:
        """Of the draft vocabulary's places, by d2t, and by t2d where it is there.

        Raises:
            ConfigError: they are not what is wanted, or contradict each other.
        """
        wanted = {"d2t": (size,)} | ({"t2d": (vocabulary,)} if "t2d" in self.shapes else {})
        found = self.read(wanted, integers=True)
        ids = found["d2t"].long() + torch.arange(size)
        is_sound = bool(((ids >= 0) & (ids < vocabulary)).all()) and len(set(ids.tolist())) == size
        if is_sound and "t2d" in found:
            known = found["t2d"].bool()
            is_sound = bool(known[ids].all()) and int(known.sum()) == size
        if not is_sound:
            raise ConfigError(
                f"d2t and t2d of {self.path} contradict each other, or the model's vocabulary: fetch it again"
            )
        return ids

    def _unreadable(self) -> ConfigError:
        return ConfigError(f"{self.path} cannot be read: fetch it again, or train the draft head again")
