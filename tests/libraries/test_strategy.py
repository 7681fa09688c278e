"""Libraries on top of Lightning pass the strategy's name with options to their Trainers, and keep, copy and save it."""

import pytest

from benchmarks.libraries import forecasting
from nano_loop import lightning, pytorch_lightning

from .conftest import are_equal, train

PACKAGES = {"nbeats": pytorch_lightning, "nhits": pytorch_lightning, "pytorch_forecasting_tft": lightning}


@pytest.mark.parametrize("plain", PACKAGES, indirect=True)
def test_weights_and_forecasts_are_plain_ones(plain, monkeypatch, capsys):
    name, weights, loss = plain
    monkeypatch.setitem(forecasting.QUIET, "strategy", PACKAGES[name].strategy(exact=True))
    strategy_weights, strategy_loss = train(name)
    assert strategy_loss == loss
    assert are_equal(weights, strategy_weights)
    assert "applied  allocator" in capsys.readouterr().err


@pytest.mark.parametrize("plain", ["nbeats"], indirect=True)
def test_model_that_is_saved_goes_on(plain, tmp_path):
    from darts import TimeSeries
    from darts.models import NBEATSModel

    from benchmarks.libraries.programs import waves

    series = TimeSeries.from_values(waves(200))
    arguments = {**forecasting.QUIET, "strategy": pytorch_lightning.strategy(precision="auto", verbose=False)}
    model = NBEATSModel(24, 6, n_epochs=1, num_stacks=2, layer_widths=16, pl_trainer_kwargs=arguments)
    model.fit(series)
    model.save(str(tmp_path / "model.pt"))
    again = NBEATSModel.load(str(tmp_path / "model.pt"))
    assert again.predict(6, series=series) == model.predict(6)
    again.fit(series, epochs=2)
    assert again.epochs_trained == 2
