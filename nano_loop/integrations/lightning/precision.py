"""The precision plugin for ``"bf16-products"``, without Lightning's base class."""

from __future__ import annotations

from typing import Any

from torch import nn
from typing_extensions import Self

from nano_loop.config.options import Options
from nano_loop.cpu import read_machine
from nano_loop.errors import NanoConfigError, error_message, shown
from nano_loop.patching.calls.calls import CallInterceptors
from nano_loop.patching.user_code import warn
from nano_loop.runtime.objects.training_objects import TrainingObjects, class_name
from nano_loop.steps.bf16_products import Bf16Products
from nano_loop.steps.step import StepContext

PRODUCTS = "bf16-products"


class ProductsPrecisionMixin:
    """Rounds the inputs of large products of a module to bf16; see ``precision="bf16-products"`` of `nano_loop.nano`.

    Lightning's base class is `Precision`. Until `teardown`, products in calls into a converted module are rounded. With
    the strategy ``"nano"``, its run does that.
    """

    precision: Any = PRODUCTS

    def __init__(self) -> None:
        super().__init__()
        #: Whether the strategy's run rounds products instead.
        self.is_left_to_run = False
        self._interceptors: CallInterceptors | None = None
        self._step: Bf16Products | None = None

    @classmethod
    def named(cls, name: str) -> Self:
        """Return the plugin of a precision that Lightning and Fabric do not know.

        Parameters
        ----------
        name : str
            ``"bf16-products"``: large products round their inputs to bf16, and all else is fp32.

        Raises
        ------
        NanoConfigError
            If it is another one.

        Examples
        --------
        >>> trainer = Trainer(plugins=precision("bf16-products"))  # Lightning's own  # doctest: +SKIP
        """
        if name != PRODUCTS:
            got = f"precision({shown('name', name)})"
            hint = "Pass others to the Trainer or to Fabric: precision='bf16-mixed'"
            raise NanoConfigError(error_message(got, f"there is a plugin for '{PRODUCTS}' alone", hint))
        return cls()

    def convert_module(self, module: nn.Module) -> nn.Module:
        """See Lightning: the module itself is not changed."""
        if self.is_left_to_run:
            return module
        if self._step is None:
            self._interceptors, machine = CallInterceptors(), read_machine()
            options = Options(precision=PRODUCTS)
            self._step = Bf16Products(StepContext(options, machine, self._interceptors))
        parts = TrainingObjects(models=[module])
        reason = self._step.skip_reason(parts)
        if reason is None:
            self._step.apply(parts)
        else:
            hint = "Leave the plugin out to train in fp32 without this warning"
            got = f"{PRODUCTS!r} for {class_name(module)}"
            warn(error_message(got, f"it is skipped: {reason.detail}", hint))
        return module

    def teardown(self) -> None:
        """See Lightning: products are torch's again."""
        super().teardown()  # type: ignore[misc]
        if self._step is not None and self._interceptors is not None:
            self._step.undo()
            self._interceptors.close()
            self._step = None
