"""Commands and options of a fleet."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from autotuner.cli.console import out
from autotuner.errors import InputError

if TYPE_CHECKING:
    from autotuner.fleet.tuning import Fleet

commands = typer.Typer()

FleetOption = Annotated[
    bool, typer.Option("--fleet", help="Measure on all GPUs of a Ray cluster. Needs the extra `fleet`.")
]
Address = Annotated[
    str | None,
    typer.Option(
        help="The cluster, as HOST:PORT. With --fleet.",
        show_default="that of this host, or else one of its own on this host's GPUs",
    ),
]
Gpus = Annotated[
    int | None,
    typer.Option(
        help="Measure on so many GPUs of this host: a cluster of its own, which ends with the command.", min=1
    ),
]
FleetMeasurerOption = Annotated[str | None, typer.Option("--measurer", hidden=True)]
FleetArguments = Annotated[str | None, typer.Option("--measurer-arguments", hidden=True)]


def given_fleet(
    fleet: bool, address: str | None, gpus: int | None, device: str, measurer: str | None, arguments: str | None
) -> "Fleet | None":
    """Return the fleet that options ask for, None where they ask for one device of this machine."""
    if address is not None and not fleet:
        raise InputError(f"--address {address}: it goes with --fleet")
    if address is not None and gpus is not None:
        raise InputError(f"--address {address} and --gpus {gpus}: give one of the two")
    if not fleet and gpus is None:
        return None
    if device != "cuda":
        raise InputError(f"--device {device}: a fleet is of GPUs, give --device cuda")
    from autotuner.fleet.tuning import Fleet

    chosen = {} if measurer is None else {"factory": measurer}
    return Fleet(address, gpus, arguments=json.loads(arguments or "{}"), **chosen)


@commands.command()
def node(
    address: Annotated[str | None, typer.Argument(help="The cluster's head, as HOST:PORT.")] = None,
    head: Annotated[bool, typer.Option("--head", help="Start the head of a cluster on this host.")] = False,
    port: Annotated[int, typer.Option(help="With --head, the port to listen at.", min=1, max=65535)] = 6379,
    gpus: Annotated[int | None, typer.Option(help="GPUs to offer.", min=0, show_default="all of this host")] = None,
    no_gpu: Annotated[bool, typer.Option("--no-gpu", help="This host has no GPU: it runs tuning tasks only.")] = False,
    wait: Annotated[
        float | None,
        typer.Option(
            help="Seconds to wait for a head that does not answer yet.", min=0, show_default="120; 0 with --check"
        ),
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Check this host, and start nothing.")] = False,
) -> None:
    """Make this host part of a Ray cluster, and stay in the foreground as `ray start`.

    Checks GPUs, driver and torch, that the head answers and lets this host in, and that Ray's and Python's versions
    are the same there. A head may have no GPU, and draws the cluster's token where there is none. Whoever has that
    token can run code on all of the cluster's hosts.
    """
    import os

    from autotuner.fleet import node as host
    from autotuner.fleet.head import WAIT_S, check_head
    from autotuner.fleet.importing import imported
    from autotuner.fleet.token import draw_token

    if head == (address is not None):
        raise InputError("give either the head's address, HOST:PORT, or --head")
    imported()
    count: int | None = 0 if no_gpu else gpus
    if address is not None:
        wait_s = (0.0 if check else WAIT_S) if wait is None else wait
        check_head(address, wait_s, lambda words: out.print(words, soft_wrap=True))
    if count is None and not (head and not host.has_gpus()):
        names = host.check_gpus()
        out.print(f"{len(names)} x {names[0]}", highlight=False)
    elif count is None:
        count = 0
    if head:
        drawn = draw_token(os.environ, dry=check)
        if drawn is not None:
            words = "the head will draw the cluster's token into" if check else "the cluster's token was drawn into"
            out.print(f"{words} {drawn}: other hosts need a copy of it", soft_wrap=True)
    if check:
        out.print("this host can take part")
        return
    host.become(host.start_command(head=head, address=address, port=port, gpus=count, rest=[]))
