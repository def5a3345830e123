"""enroot's credentials file: the right lines for each registry, and what stands there kept."""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.enroot import credentials
from toolkit.enroot.credentials import Entry, literal, machines, merge, problems, registry_name
from toolkit.errors import CredentialsError, UsageError

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize(
    ("registry", "hosts"),
    [
        pytest.param("git.example.com:5005", ["git.example.com"], id="case_7_1"),
        pytest.param("nvcr.io", ["nvcr.io", "authn.nvidia.com"], id="case_7_2"),
        ("https://nvcr.io/nvidia/pyg:24.01-py3", ["nvcr.io", "authn.nvidia.com"]),
        ("docker.io", ["registry-1.docker.io", "auth.docker.io"]),
        ("index.docker.io", ["registry-1.docker.io", "auth.docker.io"]),
        ("https://index.docker.io/v1/", ["registry-1.docker.io", "auth.docker.io"]),
        ("registry.gitlab.com", ["registry.gitlab.com", "gitlab.com"]),
        ("ghcr.io", ["ghcr.io"]),
        ("GHCR.io", ["ghcr.io"]),
        ("localhost:5000", ["localhost"]),
        ("registry.example.com#team/img:1", ["registry.example.com"]),
    ],
)
def test_machines(registry: str, hosts: list[str]) -> None:
    assert list(machines(registry_name(registry))) == hosts


def test_the_token_server_that_a_registry_names_gets_a_line_without_its_port() -> None:
    assert machines("reg.example.com:5050", "auth.example.com:8443") == (
        "reg.example.com",
        "auth.example.com",
    )
    assert machines("reg.example.com", "reg.example.com") == ("reg.example.com",)


@pytest.mark.parametrize("bad", ["", "pyg", "ubuntu:24.04", "host:99999", "-x.com", "a b.com"])
def test_what_is_no_registry_is_refused(bad: str) -> None:
    with pytest.raises(UsageError, match="not a registry"):
        registry_name(bad)


def test_a_password_in_the_registry_is_not_shown() -> None:
    with pytest.raises(UsageError) as refused:
        registry_name("https://ci:hunter2@reg.example.com")
    assert "hunter2" not in str(refused.value)


@pytest.mark.parametrize(
    ("registry", "region"),
    [
        pytest.param("111122223333.dkr.ecr.us-west-2.amazonaws.com", "us-west-2", id="case_7_6"),
        ("111122223333.dkr.ecr.cn-north-1.amazonaws.com.cn", "cn-north-1"),
        ("111122223333.dkr.ecr-fips.us-gov-west-1.amazonaws.com", "us-gov-west-1"),
    ],
)
def test_ecr_asks_for_a_password_at_each_use(registry: str, region: str) -> None:
    user = credentials.user_for(registry, None)
    command = credentials.command_for(registry)
    assert user == "AWS"
    assert command == f"$(aws ecr get-login-password --region {region})"
    line = Entry(registry, user, command).line()
    assert line == f"machine {registry} login AWS password {command}"
    text = merge("", [Entry(registry, user, command)])
    assert credentials.find(text, registry) == Entry(registry, user, command)
    assert problems(text, 0o600) == []


def test_case_7_2_the_user_is_literal_and_no_other_is_taken() -> None:
    assert credentials.user_for("nvcr.io", None) == "$oauthtoken"
    with pytest.raises(CredentialsError, match=r"\$oauthtoken"):
        credentials.user_for("nvcr.io", "me@example.com")


NGC = "machine nvcr.io login $oauthtoken password t\n"


@pytest.mark.parametrize(
    ("text", "mode", "words"),
    [
        pytest.param(NGC, 0o600, "none for authn.nvidia.com", id="case_7_2_second_line_missing"),
        pytest.param(
            "machine git.example.com:5005 login a password b\n", 0o600, "host alone", id="case_7_1"
        ),
        ("machine https://h.com/v2/ login a password b\n", 0o600, "host alone, h.com"),
        ("machine h.com\n  login a\n  password b\n", 0o600, "one line"),
        ("machine h.com password b login a\n", 0o600, "one line"),
        (" machine h.com login a password b\n", 0o600, "indented"),
        ("machine h.com login a\n", 0o600, "not a complete entry"),
        ("machine h.com login a password b\n", 0o644, "0644"),
        (
            "machine nvcr.io login me password t\nmachine authn.nvidia.com login me password t\n",
            0o600,
            "$oauthtoken",
        ),
        ("machine registry-1.docker.io login a password b\n", 0o600, "none for auth.docker.io"),
    ],
)
def test_problems_are_told(text: str, mode: int, words: str) -> None:
    assert words in "; ".join(problems(text, mode))


def test_docker_hub_with_its_token_server_alone_is_right_for_user_at_image() -> None:
    assert problems("machine auth.docker.io login a password b\n", 0o600) == []


KEPT = """# the team's logins
machine other.example.com login me password p#w"d  # note

macdef init
machine not.an.entry login x password y

machine reg.example.com login old password gone
machine reg.example.com login second password stays
machine aws.example.com login AWS password $(aws ecr get-login-password --region x)
default login anonymous password guest
"""


def test_other_entries_and_comments_are_kept_and_the_new_one_is_first() -> None:
    merged = merge(KEPT, [Entry("reg.example.com", "new", "n"), Entry("b.com", "u", "p")])
    assert credentials.find(merged, "reg.example.com") == Entry("reg.example.com", "new", "n")
    left = [line for line in merged.splitlines() if " new " not in line and "b.com" not in line]
    assert left == KEPT.splitlines()
    # curl looks at nothing behind `default`.
    assert merged.splitlines().index(
        "machine b.com login u password p"
    ) < merged.splitlines().index("default login anonymous password guest")


def test_the_same_login_is_replaced_wherever_it_is() -> None:
    merged = merge(KEPT, [Entry("reg.example.com", "second", "fresh")])
    assert credentials.find(merged, "reg.example.com") == Entry(
        "reg.example.com", "second", "fresh"
    )
    assert "stays" not in merged
    assert "gone" in merged


def test_entries_are_repaired() -> None:
    text = (
        "machine a.com:5005 login u password p\n"
        "  machine b.com\n\tlogin v\n\tpassword q\n"
        "machine c.com login w password r"
    )
    assert merge(text, []) == (
        "machine a.com login u password p\n"
        "machine b.com login v password q\n"
        "machine c.com login w password r\n"
    )


words = st.text(st.characters(codec="ascii", exclude_categories=["Z", "C"]), min_size=1).filter(
    lambda word: not word.startswith(("#", '"'))
)
entry = st.builds(
    Entry,
    st.from_regex(r"[a-z]{1,5}\.(com|io)", fullmatch=True),
    words,
    words.filter(lambda word: not word.startswith("$")),
)
noise = st.sampled_from(["# a comment\n", "\n", "machine x\n", "nonsense here\n"])


@given(st.lists(entry.map(lambda e: f"{e.line()}\n") | noise), st.lists(entry, max_size=2))
def test_merging_twice_is_merging_once_and_loses_no_other_login(
    lines: list[str], wanted: list[Entry]
) -> None:
    text = "".join(lines)
    assert "".join(item.text for item in credentials.parse(text)) == text
    merged = merge(text, wanted)
    assert merge(merged, wanted) == merged
    new = {e.machine: e for e in wanted}
    for old in credentials.entries(text):
        if old.machine not in new or new[old.machine].login != old.login:
            assert old in credentials.entries(merged)
    for e in new.values():
        assert credentials.find(merged, e.machine) == e


@given(
    st.text(st.characters(codec="ascii", exclude_categories=["Z", "C"]), min_size=1, max_size=12)
)
def test_what_enroot_makes_of_a_password_is_the_password(secret: str) -> None:
    try:
        spelled = literal(secret)
    except CredentialsError:
        assert secret.startswith(("$", '"'))
        return
    if not spelled.startswith("$"):
        assert spelled == secret
        return
    # As enroot's common::evalnetrc does it.
    told = subprocess.run(
        ["sh", "-c", f"echo {spelled}"], capture_output=True, text=True, check=True
    )
    assert told.stdout == f"{secret}\n"


@pytest.mark.parametrize("bad", ["", "two words", "a\nb", '"quoted"', "$a b", "$*", "$'x"])
def test_a_password_that_the_file_cannot_hold_is_refused_and_not_shown(bad: str) -> None:
    with pytest.raises(CredentialsError) as refused:
        literal(bad)
    assert len(bad) < 3 or bad not in str(refused.value)


def test_the_file_is_private_whole_and_may_be_a_link(tmp_path: Path) -> None:
    real = tmp_path / "dotfiles" / "enroot"
    real.parent.mkdir()
    real.write_text("old")
    real.chmod(0o644)
    link = tmp_path / "config" / ".credentials"
    link.parent.mkdir()
    link.symlink_to(real)
    credentials.write(link, "new\n")
    assert link.is_symlink()
    assert real.read_text() == "new\n"
    assert real.stat().st_mode & 0o777 == 0o600
    assert [path.name for path in real.parent.iterdir()] == ["enroot"]


def test_a_repr_shows_no_password() -> None:
    assert "hunter2" not in repr(Entry("h.com", "u", "hunter2"))
    assert "hunter2" not in repr(credentials.parse("machine h.com login u password hunter2\n"))
