"""Claims of calls: at most one owner holds a call in an environment, and no claim outlives its owner."""

import subprocess
import threading
from collections.abc import Callable

import pytest

from autotuner.database import Storage, open_database, this_process
from autotuner.errors import DatabaseError
from autotuner.ir.records import Environment

ME, OTHER = f"{this_process()}#me", f"{this_process()}#other"
FAR = "elsewhere/1:1:1"
WAIT_S = 120.0


def keys(*numbers: int) -> set[str]:
    return {f"{number:064d}" for number in numbers}


def test_calls_are_claimed_once(database: Storage, environment: Environment) -> None:
    assert database.claim_calls(environment.key, ME, keys(1, 2)) == keys(1, 2)
    assert database.claim_calls(environment.key, OTHER, keys(2, 3)) == keys(3)
    assert database.claim_calls(environment.key, ME, keys(1, 2, 3, 4)) == keys(1, 2, 4)


def test_claiming_nothing_or_one_call_twice_is_allowed(database: Storage, environment: Environment) -> None:
    assert database.claim_calls(environment.key, ME, []) == set()
    assert database.claim_calls(environment.key, ME, [*keys(1), *keys(1)]) == keys(1)


def test_a_race_of_two_thousand_calls_is_claimed_at_once(database: Storage, environment: Environment) -> None:
    assert database.claim_calls(environment.key, OTHER, keys(7)) == keys(7)
    assert database.claim_calls(environment.key, ME, keys(*range(2000))) == keys(*range(2000)) - keys(7)


def test_released_calls_are_free_and_those_of_others_are_not(database: Storage, environment: Environment) -> None:
    database.claim_calls(environment.key, ME, keys(1))
    database.claim_calls(environment.key, OTHER, keys(2))
    database.release_calls(ME)
    database.release_calls("nobody")
    assert database.claim_calls(environment.key, FAR, keys(1, 2)) == keys(1)


def test_the_same_call_may_be_measured_in_two_environments_at_once(database: Storage, environment: Environment) -> None:
    other = Environment("cpu", "EPYC", ())
    database.remember(other)
    assert database.claim_calls(environment.key, ME, keys(1)) == keys(1)
    assert database.claim_calls(other.key, OTHER, keys(1)) == keys(1)
    database.release_calls(ME)
    assert database.claim_calls(other.key, ME, keys(1)) == set()


def test_claiming_in_an_environment_that_was_never_remembered_is_refused(database: Storage) -> None:
    with pytest.raises(DatabaseError, match="has no environment 'nowhere': `remember` it first"):
        database.claim_calls("nowhere", ME, keys(1))


def test_the_claims_of_a_killed_process_are_free_at_once(
    database: Storage, environment: Environment, start_holding: Callable[..., subprocess.Popen[str]]
) -> None:
    process = start_holding("calls", *sorted(keys(1, 2)))
    assert process.stdout is not None
    _, *got = process.stdout.readline().split()
    assert set(got) == keys(1, 2)
    assert database.claim_calls(environment.key, ME, keys(1, 2, 3)) == keys(3)
    process.kill()
    process.wait()
    assert database.claim_calls(environment.key, ME, keys(2)) == keys(2)
    assert database.claim_calls(environment.key, OTHER, keys(1, 2, 3)) == keys(1)


def test_a_claim_of_another_host_is_free_when_its_lease_has_run_out(
    database: Storage, expired: Storage, environment: Environment
) -> None:
    expired.claim_calls(environment.key, FAR, keys(1, 2))
    database.claim_calls(environment.key, FAR, keys(2, 3))
    assert database.claim_calls(environment.key, ME, keys(1, 2, 3)) == keys(1)
    assert database.claim_calls(environment.key, FAR, keys(1)) == set()


def test_a_claim_of_a_process_that_lives_stays_however_old_it_is(
    database: Storage, expired: Storage, environment: Environment
) -> None:
    expired.claim_calls(environment.key, ME, keys(1))
    assert database.claim_calls(environment.key, OTHER, keys(1)) == set()


def test_owners_that_claim_at_once_never_hold_the_same_call(
    url: str, expired: Storage, environment: Environment
) -> None:
    rounds = 20
    for turn in range(0, rounds, 2):  # half of the calls are another's, who is lost
        expired.claim_calls(environment.key, f"{FAR}#{turn}", keys(*range(100 * turn, 100 * turn + 5)))
    got: list[dict[int, set[str]]] = [{}, {}, {}]
    barrier = threading.Barrier(len(got))

    def claim(number: int) -> None:
        with open_database(url) as mine:
            for turn in range(rounds):
                wanted = keys(*range(100 * turn, 100 * turn + 5 + number))
                barrier.wait(WAIT_S)
                got[number][turn] = mine.claim_calls(environment.key, f"{this_process()}#{number}", wanted)

    threads = [threading.Thread(target=claim, args=(number,)) for number in range(len(got))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    for turn in range(rounds):
        held = [key for mine in got for key in mine[turn]]
        assert sorted(held) == sorted(keys(*range(100 * turn, 100 * turn + 7)))
