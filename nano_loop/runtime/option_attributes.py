"""The options that are attributes of `TorchNano` and the Trainer, as in BigDL-Nano."""

from __future__ import annotations

from typing import Any, Literal

import torch

from nano_loop.runtime.settings import Settings


def _option(name: str, doc: str) -> Any:
    """Return a read-only property for an option."""
    return property(lambda self: getattr(self._nano_settings.options, name), doc=doc)


class OptionAttributes:
    """Read-only attributes of an object that has ``_nano_settings``, the `Settings` of its runs."""

    _nano_settings: Settings

    use_ipex: bool = _option("use_ipex", "Whether IPEX's kernels are used.")
    channels_last: bool | Literal["auto"] = _option("channels_last", "Whether images are NHWC.")
    auto_lr: bool = _option("auto_lr", "Whether the learning rate ramps to that of several processes.")

    @property
    def cpu_for_each_process(self) -> list[list[int]] | int | None:
        """The CPU ids of each process, the number of CPUs per process, or None for even shares."""
        shares = self._nano_settings.options.cpu_for_each_process
        return shares if shares is None or isinstance(shares, int) else [list(cpus) for cpus in shares]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which models compute matrix products."""
        return self._nano_settings.options.kind.compute
