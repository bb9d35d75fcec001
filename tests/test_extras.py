"""Each extra alone, in an environment that has what it installs and nothing else.

What it is for works, and what another extra is for says so in a sentence.
"""

import os
import re
import subprocess
import sys
import tomllib
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

import pytest
import torch
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from autotuner import save_configuration
from autotuner.api.survey import region_calls
from autotuner.extras import EXTRAS
from tests.cli.living import until
from tests.runtime.capture.known import planned
from tests.runtime.plans import configuration, model
from tests.wheels import made_wheel

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
SMALL = {"b": 2, "l": 8, "h": 32, "n": 2, "p": 16, "f": 64}
MODEL = """
import autotuner, torch
torch.manual_seed(0)
layer = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
x = torch.randn(2, 8, 32)
"""
REFUSED = """
for name in NAMES:
    try:
        getattr(autotuner, name)
    except autotuner.AutotunerError as error:
        print(type(error).__name__, error)
    else:
        print(name, "is there")
"""
FREE = ("numpy", "pydantic", "pyyaml")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return made_wheel(tmp_path_factory.mktemp("clone"))


class Environment:
    """A virtual environment with the wheel, and links to the packages that some of its extras install."""

    def __init__(self, folder: Path, wheel: Path, *extras: str) -> None:
        self.folder = folder
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        self.python = folder / "venv" / "bin" / "python"
        install = [sys.executable, "-m", "pip", "--python", str(self.python), "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "--no-index", wheel], check=True)
        (packages,) = (folder / "venv").glob("lib/python*/site-packages")
        (own,) = metadata.distributions(name="autotuner", path=[str(packages)])
        self.installed = needed(own, extras)
        for name in self.installed:
            of = metadata.distribution(name)
            for top in {file.parts[0] for file in of.files or [] if file.parts[0] not in ("..", "__pycache__")}:
                if not (packages / top).exists():
                    (packages / top).symlink_to(str(of.locate_file(top)))
        given = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "AUTOTUNER"))}
        for name in ("home", "tmp"):  # a lock of the device, too, that no other test holds
            (folder / name).mkdir()
        given |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp")}
        self.variables = given | {"AUTOTUNER_QUIET": "1", "AUTOTUNER_LOG_FORMAT": "words", "AUTOTUNER_THREADS": "1"}

    def run(self, *arguments: str, code: int = 0) -> str:
        """Run its Python, and return what was printed on both streams.

        Args:
            code: the exit code that is expected.
        """
        ran = subprocess.run([self.python, *arguments], cwd=self.folder, env=self.variables, check=False,
                             capture_output=True, text=True)  # fmt: skip
        said = f"{ran.stdout}{ran.stderr}"
        assert ran.returncode == code, said
        return " ".join(said.split())


def needed(of: metadata.Distribution, extras: tuple[str, ...]) -> set[str]:
    """Return the names of all distributions that one needs with some of its extras."""
    found: set[str] = set()
    waiting = [(of, extra) for extra in ("", *extras)]
    seen = {(of.name, extra) for _, extra in waiting}
    while waiting:
        distribution, extra = waiting.pop()
        for requirement in map(Requirement, distribution.requires or []):
            if requirement.marker is not None and not requirement.marker.evaluate({"extra": extra}):
                continue
            name = canonicalize_name(requirement.name)
            inner = of if name == "autotuner" else metadata.distribution(name)
            found |= set() if inner is of else {name}
            fresh = {("" if inner is not of else name, each) for each in ("", *requirement.extras)}
            for _, each in fresh:
                if (name, each) not in seen:
                    seen.add((name, each))
                    waiting.append((inner, each))
    return found


@pytest.fixture(scope="module")
def trainer(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What a trainer has who got configurations from elsewhere: torch and nothing that tunes or asks."""
    return Environment(tmp_path_factory.mktemp("trainer"), wheel, "torch")


def test_what_every_user_gets_is_three_packages_and_what_these_need(trainer: Environment) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert tuple(Requirement(each).name for each in project["dependencies"]) == FREE
    assert trainer.installed >= {*FREE, "torch"}
    others = {canonicalize_name(package) for package in EXTRAS if package != "torch"}
    assert not trainer.installed & (others - {"jinja2"})  # torch needs jinja2


def test_a_trainer_applies_configurations_without_what_tunes_or_asks(trainer: Environment) -> None:
    save_configuration(configuration(model(SMALL, dtype="float32")), trainer.folder / "layer.json")
    encoder = torch.nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, activation="gelu", batch_first=True)
    stack = torch.nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
    found = region_calls(stack, [(torch.randn(2, 8, 32),)])
    files = []
    for number, region in enumerate(found.models.values()):
        files.append(f"region{number}.json")
        save_configuration(planned(region), trainer.folder / files[-1])
    program = f"""{MODEL}
tuned = autotuner.apply(layer, "layer.json")
tuned(x).sum().backward()
print(autotuner.summary(tuned))
options = {{"configurations": {files}, "compiler": "eager"}}
torch.compile(model, backend="autotuner", options=options)(x).sum().backward()
print(autotuner.summary())
step = autotuner.training_step(model, torch.optim.SGD(model.parameters()), lambda model, x: model(x).square().mean(),
                               configurations={files}, compiler="eager")
step(x)
print("step ran")
NAMES = ("tune", "Client", "Progress")
{REFUSED}
try:
    autotuner.training_step(model, torch.optim.SGD(model.parameters()), example_inputs=(x,))
except autotuner.AutotunerError as error:
    print(error)
torch.compiler.reset()
torch.compile(model, backend="autotuner", options={{"compiler": "eager"}})(x)
print(autotuner.summary().graphs[-1].note)
"""
    said = trainer.run("-c", program)
    assert "100% of 1 calls of tuned layers ran a configuration" in said
    assert "2 of 2 regions run tuned" in said
    assert "step ran" in said
    assert 'MissingError autotuner.tune needs sqlalchemy, which is not installed: install "autotuner[tune]"' in said
    assert 'MissingError autotuner.Client needs httpx2, which is not installed: install "autotuner[client]"' in said
    assert 'tuning needs sqlalchemy, which is not installed: install "autotuner[tune]"' in said
    assert "looking configurations up in a database needs sqlalchemy, which is not installed" in said


def test_without_torch_configurations_are_read_and_what_runs_them_says_what_is_missing(
    wheel: Path, tmp_path: Path
) -> None:
    bare = Environment(tmp_path, wheel)
    save_configuration(configuration(model(SMALL, dtype="float32")), tmp_path / "layer.json")
    program = f"""
import autotuner
found = autotuner.load_configuration("layer.json")
print(found.model.name)
try:
    autotuner.apply(None, found)
except autotuner.AutotunerError as error:
    print(error)
for function in (autotuner.optimize, autotuner.module, autotuner.check, autotuner.restore, autotuner.summary):
    try:
        function(found)
    except autotuner.AutotunerError as error:
        print(error)
NAMES = ("training_step", "tune")
{REFUSED}
"""
    said = bare.run("-c", program)
    assert "bert-encoder" in said
    assert 'running a configuration needs torch, which is not installed: install "autotuner[torch]"' in said
    for use in ("compiling a model", "checking a configuration", "restoring a module", "a summary of what ran"):
        assert f'{use} needs torch, which is not installed: install "autotuner[torch]"' in said
    assert "autotuner.training_step needs torch, which is not installed" in said
    assert "autotuner.tune needs sqlalchemy" in said
    told = bare.run("-m", "autotuner.cli", "show", "layer.json", code=10)
    assert "the command line needs" in told
    assert 'install "autotuner[cli]"' in told


def test_the_command_line_alone_shows_a_configuration_and_names_the_extras_of_other_commands(
    wheel: Path, tmp_path: Path
) -> None:
    shown = Environment(tmp_path, wheel, "cli")
    save_configuration(configuration(model(SMALL, dtype="float32")), tmp_path / "layer.json")
    assert "bert-encoder" in shown.run("-m", "autotuner.cli", "show", "layer.json")
    shown.run("-m", "autotuner.cli", "report", "layer.json", "--output", "report.html")
    assert "<svg" in (tmp_path / "report.html").read_text()
    assert "no service" in shown.run("-m", "autotuner.cli", "jobs", "--server", "http://127.0.0.1:9", code=8).lower()
    for command in (["tune", "bert-encoder:tiny"], ["serve"], ["db", "upgrade"]):
        said = shown.run("-m", "autotuner.cli", *command, code=10)
        assert re.search(
            r'this command needs \w+, which is not installed: install "autotuner\[(tune|server|torch)\]"', said
        )


def test_tuning_needs_no_service_and_no_command_line(wheel: Path, tmp_path: Path) -> None:
    tuner = Environment(tmp_path, wheel, "tune", "torch")
    space = yaml.safe_load((ROOT / "search_spaces" / "kernels" / "cpu.yaml").read_text())
    space["kernels"] = {name: {"layouts": "declared"} for name in space["kernels"] if name.startswith("torch_")}
    (tmp_path / "space.yaml").write_text(yaml.safe_dump(space))  # nothing that is compiled
    program = f"""
import os, sys
os.environ |= {{"AUTOTUNER_QUIET": "0", "AUTOTUNER_PROGRESS": "rich"}}  # which only the command line installs
import autotuner
found = autotuner.tune("bert-encoder:tiny", extents={SMALL}, space="space.yaml",
                       limits=autotuner.Limits(measurements=5), end_to_end=False)
print(found.model.reference, len(found.steps) > 10, "rich" in sys.modules)
autotuner.save_configuration(found, "found.json")
import torch
if not torch.cuda.is_available():
    try:
        autotuner.tune("bert-encoder:tiny", device="cuda")
    except autotuner.AutotunerError as error:
        print("refused:", type(error).__name__, error)
"""
    said = tuner.run("-c", program)
    assert "bert-encoder:tiny True False" in said
    assert "autotuner: bert-encoder:tiny: enumerating" in said
    assert (tmp_path / "found.json").exists()
    assert (tmp_path / "autotuner.sqlite").exists()
    assert torch.cuda.is_available() or "refused: DeviceError no device 'cuda' here; what is here: cpu (" in said


@pytest.fixture(scope="module")
def bare_tuner(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """What keeps and asks a database, without torch."""
    return Environment(tmp_path_factory.mktemp("bare_tuner"), wheel, "tune")


def test_without_torch_a_database_is_kept_and_tuning_says_what_is_missing(bare_tuner: Environment) -> None:
    assert not bare_tuner.installed & {"torch", "rich", "typer", "httpx2"}
    program = f"""
import autotuner
from autotuner.database import open_database
with open_database("kept.sqlite") as database:
    print("kept", database.environments())
try:
    autotuner.tune("bert-encoder:tiny", extents={SMALL}, database="kept.sqlite", end_to_end=False)
except autotuner.AutotunerError as error:
    print(type(error).__name__, error)
NAMES = ("training_step",)
{REFUSED}
"""
    said = bare_tuner.run("-c", program)
    assert "kept []" in said
    for use in ("measuring", "autotuner.training_step"):
        assert f'MissingError {use} needs torch, which is not installed: install "autotuner[torch]"' in said


def test_postgresql_finds_its_driver_and_without_it_names_the_extra(
    bare_tuner: Environment, wheel: Path, tmp_path: Path
) -> None:
    program = """
import autotuner
from autotuner.database import open_database
try:
    open_database("postgresql+psycopg://nobody@127.0.0.1:9/none")
except autotuner.AutotunerError as error:
    print(type(error).__name__, error)
"""
    said = bare_tuner.run("-c", program)
    assert 'needs psycopg, which is not installed: install "autotuner[postgresql]"' in said
    served = Environment(tmp_path, wheel, "tune", "postgresql")
    said = served.run("-c", program)
    assert "MissingError" not in said
    assert "UnavailableError database postgresql+psycopg://nobody@127.0.0.1:9/none" in said


def test_plot_draws_a_figure_of_a_plan_and_without_it_the_command_names_the_extra(wheel: Path, tmp_path: Path) -> None:
    drawing = Environment(tmp_path, wheel, "cli", "plot")
    save_configuration(configuration(model(SMALL, dtype="float32")), tmp_path / "layer.json")
    command = ("-m", "autotuner.cli", "plot", "layer.json", "--kind", "memory", "--output", "memory.svg")
    drawing.run(*command)
    assert "<svg" in (tmp_path / "memory.svg").read_text()
    (linked,) = (tmp_path / "venv").glob("lib/python*/site-packages/matplotlib")
    linked.unlink()
    said = drawing.run(*command, code=10)
    assert 'a figure needs matplotlib, which is not installed: install "autotuner[plot]"' in said


def test_a_fleet_finds_ray_and_without_it_names_the_extra(bare_tuner: Environment, wheel: Path, tmp_path: Path) -> None:
    program = """
import autotuner
from autotuner.fleet.importing import imported
try:
    print("ray", imported().__version__)
except autotuner.AutotunerError as error:
    print(type(error).__name__, error)
"""
    said = bare_tuner.run("-c", program)
    assert said == 'MissingError a fleet needs ray, which is not installed: install "autotuner[fleet]"'
    assert re.fullmatch(r"ray 2\.60\.\d+", Environment(tmp_path, wheel, "fleet").run("-c", program))


def test_all_is_command_line_tuning_client_and_service_without_torch(wheel: Path, tmp_path: Path) -> None:
    whole = Environment(tmp_path, wheel, "all")
    of = {package for package, extra in EXTRAS.items() if extra in ("cli", "client", "server", "tune")}
    assert whole.installed >= {canonicalize_name(package) for package in of}
    assert not whole.installed & {"torch", "ray", "psycopg", "matplotlib"}
    program = f"""
import importlib
for package in {sorted(of)}:
    importlib.import_module(package)
import autotuner.cli.program, autotuner.server.http.application, autotuner.tuner
print("all is there")
"""
    assert "all is there" in whole.run("-c", program)


@contextmanager
def serving(environment: Environment) -> Iterator[str]:
    """Run a service without a worker, and yield its URL."""
    log = environment.folder / "log"
    command = [str(environment.python), "-m", "autotuner.cli", "serve", "--port", "0"]
    with log.open("w") as file:
        service = subprocess.Popen(command, cwd=environment.folder, env=environment.variables, stdout=file, stderr=file)
    try:
        until(lambda: "serving url=" in log.read_text() or service.poll() is not None)
        found = re.search(r"serving url='([^']+)'", log.read_text())
        assert found is not None, log.read_text()
        yield found[1]
    finally:
        service.kill()
        service.wait()


def test_a_service_without_torch_answers_a_client_that_has_nothing_else(wheel: Path, tmp_path: Path) -> None:
    (tmp_path / "service").mkdir()
    (tmp_path / "client").mkdir()
    service = Environment(tmp_path / "service", wheel, "server")
    asking = Environment(tmp_path / "client", wheel, "client")
    assert "torch" not in service.installed
    assert not asking.installed & {"torch", "sqlalchemy", "rich", "typer"}
    with serving(service) as url:
        program = f"""
import autotuner
with autotuner.Client("{url}") as client:
    job = client.submit("bert-encoder:tiny", device="cpu")
    print("submitted", job.id, job.state)
"""
        assert re.search(r"submitted 1 \w+", asking.run("-c", program))
