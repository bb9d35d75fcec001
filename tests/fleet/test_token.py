"""The token of a cluster: where it is, what is wrong with it, and the drawing of one."""

import os
import stat
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from autotuner.errors import ClusterTokenError
from autotuner.fleet.token import draw_token, has_token, refused, require_token

ADDRESS = "head.example:6379"


def at(home: Path, **others: str) -> dict[str, str]:
    return {"HOME": str(home), **others}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_a_head_draws_a_token_that_its_owner_alone_can_read_and_keeps_it(tmp_path: Path) -> None:
    path = tmp_path / ".ray" / "auth_token"
    assert draw_token(at(tmp_path), dry=True) == path
    assert not path.exists()
    before = os.umask(0)
    try:
        assert draw_token(at(tmp_path)) == path
    finally:
        os.umask(before)
    assert (mode(path), mode(path.parent), len(path.read_text())) == (0o600, 0o700, 64)
    assert sorted(each.name for each in path.parent.iterdir()) == ["auth_token"]
    drawn = path.read_text()
    assert draw_token(at(tmp_path)) is None
    assert path.read_text() == drawn
    require_token(at(tmp_path), ADDRESS)


def test_two_heads_that_start_at_once_have_one_token(tmp_path: Path) -> None:
    program = "import os; from autotuner.fleet.token import draw_token; print(draw_token(os.environ))"
    environment = {**os.environ, **at(tmp_path)}
    heads = [
        subprocess.Popen([sys.executable, "-c", program], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(4)
    ]
    said = [head.communicate()[0].strip() for head in heads]
    assert [head.returncode for head in heads] == [0] * 4
    assert sorted(said) == [str(tmp_path / ".ray" / "auth_token")] + ["None"] * 3


def test_without_a_token_it_says_where_it_was_looked_for_and_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(
        ClusterTokenError, match=rf"no token for the cluster at {ADDRESS}: there is no {tmp_path}.*copy"
    ):
        require_token(at(tmp_path), ADDRESS)
    with pytest.raises(ClusterTokenError, match=f"there is no {tmp_path}/other; copy the head's token"):
        require_token(at(tmp_path, RAY_AUTH_TOKEN_PATH=f"{tmp_path}/other"), ADDRESS)
    with pytest.raises(ClusterTokenError, match="none of RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH and HOME is set"):
        require_token({}, ADDRESS)


@pytest.mark.parametrize(
    ("content", "words"), [(b"", "is empty"), (b" \n", "is empty"), (b"\xff\xfe", "cannot be read .it is no text")]
)
def test_a_file_that_holds_no_token_is_told(tmp_path: Path, content: bytes, words: str) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    for ask in (has_token, draw_token):
        with pytest.raises(ClusterTokenError, match=f"{path} {words}"):
            ask(at(tmp_path, RAY_AUTH_TOKEN_PATH=str(path)))


def test_a_file_that_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(ClusterTokenError, match=rf"the token in {tmp_path} cannot be read \(Is a directory\): copy"):
        has_token(at(tmp_path, RAY_AUTH_TOKEN_PATH=str(tmp_path)))
    with pytest.raises(ClusterTokenError, match="RAY_AUTH_TOKEN is blank"):
        has_token(at(tmp_path, RAY_AUTH_TOKEN=" "))


@pytest.mark.parametrize("dry", [True, False])
def test_a_folder_in_which_none_can_be_drawn_is_told(tmp_path: Path, dry: bool) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ClusterTokenError, match=r"none can be drawn into .*name a file in RAY_AUTH_TOKEN_PATH"):
        draw_token(at(tmp_path / "file"), dry=dry)


def test_the_environments_token_goes_before_files(tmp_path: Path) -> None:
    assert draw_token(at(tmp_path, RAY_AUTH_TOKEN="secret")) is None
    assert not list(tmp_path.iterdir())
    require_token({"RAY_AUTH_TOKEN": "secret"}, ADDRESS)


def test_a_token_that_every_user_can_read_is_made_private(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o644)
    with pytest.warns(UserWarning, match=f"{path} was readable for every user of this host, mode 0644; it is 0600 now"):
        assert has_token(at(tmp_path, RAY_AUTH_TOKEN_PATH=str(path)))
    assert mode(path) == 0o600
    path.chmod(0o640)
    assert has_token(at(tmp_path, RAY_AUTH_TOKEN_PATH=str(path)))
    assert mode(path) == 0o640, "a group was chosen on purpose"


def test_a_readable_token_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    path.write_text("secret")
    path.chmod(0o604)

    def denied(_self: Path, _mode: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Path, "chmod", denied)
    with pytest.raises(ClusterTokenError, match=f"{path} is readable for every user .* give it mode 0600"):
        has_token(at(tmp_path, RAY_AUTH_TOKEN_PATH=str(path)))


def test_where_authentication_is_off_it_warns_and_needs_no_token(tmp_path: Path) -> None:
    environment = at(tmp_path, RAY_AUTH_MODE="disabled")
    with pytest.warns(UserWarning, match="RAY_AUTH_MODE=disabled: authentication is off, so whoever reaches"):
        require_token(environment, ADDRESS)
    with pytest.warns(UserWarning, match="authentication is off"):
        assert draw_token(environment) is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("others", "words"),
    [
        ({}, r"the token in .*/\.ray/auth_token is not the head's; copy the head's token"),
        ({"RAY_AUTH_TOKEN": "x"}, "RAY_AUTH_TOKEN is not the head's token"),
        ({"RAY_AUTH_MODE": "disabled"}, "asks for a token, and RAY_AUTH_MODE=disabled here"),
    ],
)
def test_a_head_that_does_not_take_the_token_is_told(tmp_path: Path, others: Mapping[str, str], words: str) -> None:
    assert str(refused(at(tmp_path, **others), ADDRESS)).startswith(f"the head at {ADDRESS}")
    with pytest.raises(ClusterTokenError, match=words):
        raise refused(at(tmp_path, **others), ADDRESS)
