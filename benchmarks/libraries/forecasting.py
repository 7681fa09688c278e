"""Forecasters of darts, neuralforecast and pytorch-forecasting, which train with Lightning."""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.libraries.programs import Fit, Trained, program, waves

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}
HORIZON = 12


@program("darts", "_NBEATSModule, trained by Adam")
def nbeats(small: bool) -> Fit:
    """N-BEATS."""
    return _darts("NBEATSModel", small, 4, **({"num_stacks": 2, "layer_widths": 32} if small else {}))


@program("darts", "_TFTModule, trained by Adam")
def darts_tft(small: bool) -> Fit:
    """Temporal fusion transformer."""
    return _darts("TFTModel", small, 10, add_relative_index=True, hidden_size=8 if small else 16)


@program("darts", "_TCNModule, trained by Adam")
def tcn(small: bool) -> Fit:
    """Temporal convolutional network."""
    return _darts("TCNModel", small, 30, num_filters=3 if small else 32)


def _darts(kind: str, small: bool, epochs: int, **settings: Any) -> Fit:
    from darts import TimeSeries, models

    series = TimeSeries.from_values(waves(300 if small else 1000))
    epochs = 1 if small else epochs
    model = getattr(models, kind)(48, HORIZON, n_epochs=epochs, random_state=0, pl_trainer_kwargs=QUIET, **settings)

    def fit() -> Trained:
        model.fit(series[:-HORIZON])
        errors = model.predict(HORIZON).values() - series[-HORIZON:].values()
        return Trained([model.model], float(np.square(errors).mean()))

    return fit


@program("neuralforecast", "NHITS, trained by Adam")
def nhits(small: bool) -> Fit:
    """NHITS."""
    return _neuralforecast("NHITS", small, 60, **({"mlp_units": 3 * [[32, 32]]} if small else {}))


@program("neuralforecast", "LSTM, trained by Adam")
def neuralforecast_lstm(small: bool) -> Fit:
    """LSTM."""
    sizes = {"encoder_hidden_size": 16, "decoder_hidden_size": 16} if small else {}
    return _neuralforecast("LSTM", small, 100, **sizes)


def _neuralforecast(kind: str, small: bool, steps: int, **settings: Any) -> Fit:
    import pandas as pd
    from neuralforecast import NeuralForecast, models

    count, length = (2, 200) if small else (32, 400)
    dates = pd.date_range("2020", periods=length, freq="D")
    frames = [pd.DataFrame({"unique_id": f"{n:02}", "ds": dates, "y": waves(length, n)}) for n in range(count)]
    past, future = (pd.concat(part) for part in zip(*((f[:-HORIZON], f[-HORIZON:]) for f in frames), strict=True))
    model = getattr(models, kind)(
        h=HORIZON, input_size=48, max_steps=10 if small else steps, random_seed=0, **QUIET, **settings
    )

    def fit() -> Trained:
        forecaster = NeuralForecast([model], freq="D")
        forecaster.fit(past, val_size=0)
        errors = forecaster.predict()[kind].to_numpy() - future["y"].to_numpy()
        return Trained(forecaster.models, float(np.square(errors).mean()))

    return fit


@program("pytorch-forecasting", "TemporalFusionTransformer, trained by Adam")
def pytorch_forecasting_tft(small: bool) -> Fit:
    """Temporal fusion transformer."""
    import lightning.pytorch as pl
    import pandas as pd
    from pytorch_forecasting import TemporalFusionTransformer, TimeSeriesDataSet

    count, length = (1, 200) if small else (4, 500)
    frames = [pd.DataFrame({"time": range(length), "y": waves(length, n), "name": str(n)}) for n in range(count)]
    data = TimeSeriesDataSet(
        pd.concat(frames, ignore_index=True),
        time_idx="time",
        target="y",
        group_ids=["name"],
        max_encoder_length=48,
        max_prediction_length=HORIZON,
        time_varying_known_reals=["time"],
        time_varying_unknown_reals=["y"],
    )
    loader = data.to_dataloader(train=True, batch_size=64, num_workers=0)
    model = TemporalFusionTransformer.from_dataset(data, hidden_size=8 if small else 32)
    trainer = pl.Trainer(max_epochs=1 if small else 3, gradient_clip_val=0.1, **QUIET)

    def fit() -> Trained:
        trainer.fit(model, loader)
        return Trained([model], trainer.callback_metrics["train_loss_epoch"].item())

    return fit
