"""The workloads: a model, its optimizer, its batches and its loss, as a user would write them."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.workloads import users
from benchmarks.workloads.images import resnet18_folder, resnet50, unet, vit
from benchmarks.workloads.sequences import bert, gpt2, gpt2_masked, lstm, qwen_lora
from benchmarks.workloads.tables import mlp
from benchmarks.workloads.untuned import convnext, distilbert, efficientnet, group_norm_unet, mobilenet, t5
from benchmarks.workloads.workload import Workload

#: The default workloads, by name. Each accepts whether it should be small, for a quick check.
WORKLOADS: dict[str, Callable[[bool], Workload]] = {
    "resnet50": resnet50,
    "vit": vit,
    "bert": bert,
    "gpt2": gpt2,
    "lstm": lstm,
    "unet": unet,
    "mlp": mlp,
    "resnet18_folder": resnet18_folder,
}

#: Models on which no size limit in nano_loop's source was tuned.
UNTUNED: dict[str, Callable[[bool], Workload]] = {
    "mobilenet": mobilenet,
    "efficientnet": efficientnet,
    "convnext": convnext,
    "distilbert": distilbert,
    "t5": t5,
    "group_norm_unet": group_norm_unet,
}

#: Language models whose logits are large, trained and with adapters.
LANGUAGE: dict[str, Callable[[bool], Workload]] = {"gpt2_masked": gpt2_masked, "qwen_lora": qwen_lora}

#: The small models that people train on CPUs. The list is fixed.
USERS: dict[str, Callable[[bool], Workload]] = {
    workload.__name__: workload
    for workload in (
        *(users.tabular, users.policy, users.critic, users.gru_forecast, users.lstm_forecast, users.tcn_forecast),
        *(users.transformer_forecast, users.nbeats, users.autoencoder, users.lenet, users.gnn, users.text_cnn),
        *(users.tabnet, users.bpr, users.wide),
    )
}
ALL = WORKLOADS | UNTUNED | LANGUAGE | USERS
#: Names of groups of workloads.
LISTS = {"tuned": tuple(WORKLOADS), "untuned": tuple(UNTUNED), "language": tuple(LANGUAGE), "users": tuple(USERS)}
LISTS["all"] = tuple(ALL)

__all__ = ["ALL", "LANGUAGE", "LISTS", "UNTUNED", "USERS", "WORKLOADS", "Workload"]
