"""A configuration from a service for a module: applied where it fits, and never a failure where it does not."""

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import httpx2
import pytest
import torch
from torch import nn

import autotuner
from autotuner.database import open_database
from autotuner.errors import ConfigurationError, InputError, ModelError
from autotuner.measure.devices import environment
from autotuner.measure.devices.cpu import cpu_name
from autotuner.runtime import TunedModule, TunedWarning
from autotuner.runtime.framework import encoder_layer
from autotuner.server.client import Client
from tests.runtime.layers import assert_equal, batch, gradients
from tests.runtime.plans import MASKED, TINY, configuration, model
from tests.server.client.served import Served

pytestmark = pytest.mark.slow

SHAPE = {axis: TINY[axis] for axis in "bl"}
PLAIN = model()


class Service:
    """A service that knows one configuration, or none."""

    def __init__(self, match: str, *, differs: tuple[str, ...] = (), masked: bool = False, **changes: Any) -> None:
        found = configuration(MASKED if masked else PLAIN)
        best = {
            "id": 7, "dtype": "float64", "extents": TINY, "complete": True, "device_type": "cpu",
            "device_name": "another", "environment_key": "e", "predicted_us": 1.0, "measured_us": None,
            "created_at": "2026-11-20T10:00:00Z", "configuration": found.to_json(),
        } | changes  # fmt: skip
        none: dict[str, Any] = {"match": "none", "differs": [], "message": "", "best": None}
        known = none if match == "none" else {"match": match, "differs": differs, "message": "", "best": best}
        self.asked: list[Mapping[str, Any]] = []

        def handle(request: httpx2.Request) -> httpx2.Response:
            self.asked.append(request.url.params)
            wants_mask = "attention_mask=true" in request.url.params.get_list("option")
            return httpx2.Response(200, json=known if wants_mask == masked else none)

        self.client = Client("http://service", transport=httpx2.MockTransport(handle))


def layer() -> nn.TransformerEncoderLayer:
    return encoder_layer(PLAIN, 0)


def stays(module: nn.Module, server: str | Client, sentence: str, extents: Mapping[str, int] = SHAPE) -> str:
    """Assert that a module stays as it is, with one warning that points here; return what it says."""
    with pytest.warns(TunedWarning, match=sentence) as warned:
        assert autotuner.apply(module, server=server, extents=extents) is module
    assert len(warned) == 1
    assert warned[0].filename == __file__
    return str(warned[0].message)


def test_the_best_configuration_of_this_device_is_applied_without_a_word() -> None:
    service, original = Service("exact"), layer()
    twin = copy.deepcopy(original)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tuned = autotuner.apply(original, server=service.client, extents=SHAPE)
    assert isinstance(tuned, TunedModule)
    assert tuned.configuration == configuration(PLAIN)
    assert_equal(gradients(tuned, batch()), gradients(twin, batch()))
    assert tuned.calls == 1


def test_the_real_service_is_asked_and_answers(tmp_path: Path) -> None:
    found = configuration(PLAIN)
    here = environment("cpu")
    with open_database(tmp_path / "service.sqlite") as database:
        served = Served(database)
        try:
            original = layer()
            stays(original, served.url, f"{served.url} knows no configuration of bert-encoder float64 b=2 l=6")
            database.remember(here)
            database.configurations.save(
                request_key="0" * 64, environment_key=here.key, family_key=PLAIN.family, dtype=PLAIN.dtype,
                extents=PLAIN.extents, complete=True, document=found.to_json(), total_us=1.0,
            )  # fmt: skip
            tuned = autotuner.apply(original, server=served.url, extents=SHAPE)
        finally:
            served.stop()
    assert isinstance(tuned, TunedModule)
    assert tuned.configuration == found


def test_of_several_extents_those_that_the_service_knows_are_applied_and_the_others_named(tmp_path: Path) -> None:
    here = environment("cpu")
    known = [PLAIN, model(TINY | {"b": 3, "l": 4})]
    shapes = [{axis: found.extents[axis] for axis in "bl"} for found in known]
    with open_database(tmp_path / "service.sqlite") as database:
        database.remember(here)
        for number, found in enumerate(known):
            database.configurations.save(
                request_key=f"{number:064}", environment_key=here.key, family_key=found.family, dtype=found.dtype,
                extents=found.extents, complete=True, document=configuration(found).to_json(), total_us=1.0,
            )  # fmt: skip
        served = Served(database)
        try:
            with pytest.warns(TunedWarning, match=r"knows no configuration of bert-encoder float64 b=1 l=1") as warned:
                tuned = autotuner.apply(layer(), server=served.url, extents=[shapes[1], {"b": 1, "l": 1}, shapes[0]])
        finally:
            served.stop()
    assert isinstance(tuned, TunedModule)
    assert [(found.model.extents["b"], found.model.extents["l"]) for found in tuned.configurations] == [(3, 4), (2, 6)]
    assert [found.filename for found in warned] == [__file__]


@pytest.mark.parametrize("extents", [[], 3, [3], [SHAPE, "l=64"]])
def test_extents_that_are_no_mappings_are_the_callers_mistake(extents: Any) -> None:
    with pytest.raises(InputError, match=r"extents is .*: give a mapping of b and l, or a list of one for each shape"):
        autotuner.apply(layer(), server="http://service", extents=extents)


@pytest.mark.parametrize("given", [3, [3], {"b": 4}, [None]])
def test_what_is_no_configuration_is_the_callers_mistake(given: Any) -> None:
    with pytest.raises(InputError, match="is no configuration: give one, the path of its file, or a list of these"):
        autotuner.apply(layer(), given)


def test_extents_beside_a_configuration_are_the_callers_mistake() -> None:
    with pytest.raises(InputError, match="extents go with a server: a configuration has its own"):
        autotuner.apply(layer(), configuration(PLAIN), extents=SHAPE)


def test_what_is_asked_for_is_the_module_on_this_machines_device() -> None:
    service = Service("exact")
    autotuner.apply(layer(), server=service.client, extents=SHAPE)
    asked = service.asked[0]
    assert (asked["model"], asked["dtype"]) == ("bert-encoder", "float64")
    assert (asked.get("device_type", "cpu"), asked["device_name"]) == ("cpu", cpu_name())
    assert {"b=2", "l=6", "h=8", "n=2", "p=4", "f=12"} == set(asked.get_list("extent"))  # type: ignore[attr-defined]


def test_a_configuration_with_a_mask_over_keys_does_as_well() -> None:
    tuned = autotuner.apply(encoder_layer(MASKED, 0), server=Service("exact", masked=True).client, extents=SHAPE)
    assert isinstance(tuned, TunedModule)
    assert tuned.configuration.model.options["attention_mask"] is True


def test_a_configuration_of_another_device_is_applied_and_said_to_be_one() -> None:
    service = Service("near_device", differs=("device_name",))
    with pytest.warns(TunedWarning, match="was tuned on another device, another, and may not be the fastest") as warned:
        tuned = autotuner.apply(layer(), server=service.client, extents=SHAPE)
    assert isinstance(tuned, TunedModule)
    assert warned[0].filename == __file__


def test_a_configuration_of_another_type_of_device_is_not_applied() -> None:
    service = Service("near_device", differs=("device_type", "device_name"), device_type="cuda")
    stays(layer(), service.client, r"\(the nearest differs in device_type, device_name\)")


def test_a_configuration_for_other_extents_is_not_applied() -> None:
    stays(layer(), Service("near_shape", differs=("extents.b",)).client, r"\(the nearest differs in extents\.b\)")


def test_where_none_is_known_the_command_that_tunes_one_is_said() -> None:
    said = stays(layer(), Service("none").client, "http://service knows no configuration of bert-encoder float64")
    command = said.partition("for one: ")[2]
    assert command.startswith("autotuner submit bert-encoder --extent b=2 --extent l=6 --extent h=8 --extent n=2 ")
    for part in ("--option attention_dropout=0.0", "--dtype float64", "--device-name", "--server http://service"):
        assert part in command
    assert "activation=" not in command, "what the model file says by default is not repeated"


def test_a_service_that_cannot_be_reached_leaves_the_module_as_it_is() -> None:
    stays(layer(), "http://127.0.0.1:9", "no service answers at http://127.0.0.1:9")


def test_a_configuration_that_does_not_fit_after_all_leaves_the_module_as_it_is() -> None:
    wrong = configuration(model(activation="relu")).to_json()
    stays(layer(), Service("exact", configuration=wrong).client, "activation is 'gelu_erf', the configuration's 'relu'")
    stays(layer(), Service("exact", configuration={"schema": 99}).client, "its schema version is 99")


def test_a_module_of_no_known_kind_stays_as_it_is() -> None:
    stays(nn.Linear(2, 2), Service("exact").client, "torch.nn.modules.linear.Linear cannot be tuned")
    stays(nn.ReLU(), Service("exact").client, "cannot be tuned", extents={})


def test_extents_must_say_how_large_batches_are() -> None:
    service = Service("exact")
    with pytest.raises(ModelError, match="give extents for b and l"):
        autotuner.apply(layer(), server=service.client)
    with pytest.raises(ModelError, match="no axis 'z'"):
        autotuner.apply(layer(), server=service.client, extents=SHAPE | {"z": 1})


def test_a_server_that_is_no_url_is_the_callers_mistake() -> None:
    with pytest.raises(InputError, match="is no URL of a service"):
        autotuner.apply(layer(), server="service", extents=SHAPE)
    with pytest.raises(InputError, match="server is 3: give the URL of a service, or"):
        autotuner.apply(layer(), server=3, extents=SHAPE)  # type: ignore[arg-type]


def test_a_configuration_or_a_server_is_given_and_not_both() -> None:
    found = configuration(PLAIN)
    for given in ({}, {"configuration": found, "server": "http://service"}):
        with pytest.raises(InputError, match="give apply a configuration or a server"):
            autotuner.apply(layer(), **given)  # type: ignore[arg-type]
    assert isinstance(autotuner.apply(layer(), found), TunedModule)
    with pytest.raises(
        ConfigurationError, match=r"the configuration is of another module: .* this Linear has the type"
    ):
        autotuner.apply(nn.Linear(2, 2), found)
    assert torch.is_grad_enabled()


def test_extents_that_contradict_the_module_are_the_callers_mistake() -> None:
    with pytest.raises(ModelError, match=r"extents give h=99, and the module's own is \d+: leave it out"):
        autotuner.apply(layer(), server=Service("none").client, extents=SHAPE | {"h": 99})


def test_a_service_that_refuses_the_model_never_ends_a_training() -> None:
    refusal = {"title": "Conflict", "status": 409, "detail": "model 'bert-encoder': no option 'epsilon'"}
    transport = httpx2.MockTransport(lambda _: httpx2.Response(409, json=refusal))
    stays(layer(), Client("http://service", transport=transport), "no option 'epsilon'")


def test_what_was_measured_in_part_is_applied_and_said_to_be_so() -> None:
    asked = Service("exact", complete=False, device_name=cpu_name())
    with pytest.warns(TunedWarning, match="not all that could matter was measured for configuration 7"):
        tuned = autotuner.apply(layer(), server=asked.client, extents=SHAPE)
    assert isinstance(tuned, TunedModule)


def test_a_configuration_may_be_given_as_the_path_of_its_file(tmp_path: Path) -> None:
    autotuner.save_configuration(configuration(PLAIN), tmp_path / "best.json")
    assert isinstance(autotuner.apply(layer(), str(tmp_path / "best.json")), TunedModule)
