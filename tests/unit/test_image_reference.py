"""References are read and spelled the way Docker, enroot 3.5.0, enroot 4.x and pyxis agree on."""

from __future__ import annotations

import re
import shlex
import string

import pytest
from hypothesis import given
from hypothesis import strategies as st

from toolkit.errors import UsageError
from toolkit.image.reference import parse

HEX = "0123456789abcdef" * 4
DIGEST = f"sha256:{HEX}"

# What each enroot makes of a URI, as (user, registry, image, version): the patterns were written
# from the measured table of references, not copied, and cover the '#' and Hub forms used here.
ENROOT_3 = re.compile(
    r"docker://((?P<user>[^#]+)@)?((?P<registry>[^#]+)#)?(?P<image>[a-z0-9/._-]+)"
    r"(:(?P<version>[A-Za-z0-9._:-]+))?"
)


def read_by_enroot_3(uri: str) -> tuple[str | None, ...]:
    match = ENROOT_3.fullmatch(uri)
    assert match, f"enroot 3.5.0 refuses {uri}"
    return match["user"], match["registry"], match["image"], match["version"]


@pytest.mark.parametrize(
    ("text", "pyxis", "docker"),
    [
        pytest.param(
            "nvcr.io/nvidia/pyg:24.01-py3",
            "nvcr.io#nvidia/pyg:24.01-py3",
            "nvcr.io/nvidia/pyg:24.01-py3",
            id="case_1_1",
        ),
        pytest.param(
            f"registry.example.com:5005/group/img:1.2@{DIGEST}",
            f"registry.example.com:5005#group/img:{DIGEST}",
            f"registry.example.com:5005/group/img@{DIGEST}",
            id="case_1_2",
        ),
        *(
            pytest.param(
                text,
                "nvcr.io#nvidia/pyg:24.01-py3",
                "nvcr.io/nvidia/pyg:24.01-py3",
                id=f"case_1_3-{number}",
            )
            for number, text in enumerate(
                (
                    "nvcr.io#nvidia/pyg:24.01-py3",
                    "docker://nvcr.io#nvidia/pyg:24.01-py3",
                    "docker://nvcr.io/nvidia/pyg:24.01-py3",
                )
            )
        ),
        pytest.param(
            "master:5000/busybox", "master:5000#busybox", "master:5000/busybox", id="case_1_7-port"
        ),
        pytest.param(
            "localhost/team/img:1",
            "localhost#team/img:1",
            "localhost/team/img:1",
            id="case_1_7-localhost",
        ),
        pytest.param(
            "docker.io/library/ubuntu:24.04", "ubuntu:24.04", "ubuntu:24.04", id="case_1_7-hub"
        ),
        pytest.param("ubuntu", "ubuntu", "ubuntu", id="case_1_7-short"),
        pytest.param("docker.io#ubuntu:24.04", "ubuntu:24.04", "ubuntu:24.04", id="hub_by_hash"),
        pytest.param(
            "index.docker.io/pyg/pyg:1", "pyg/pyg:1", "pyg/pyg:1", id="hub_by_its_other_name"
        ),
        pytest.param(
            f"pyg/pyg@{DIGEST}", f"pyg/pyg:{DIGEST}", f"pyg/pyg@{DIGEST}", id="hub_by_digest"
        ),
        pytest.param("library/a/b", "library/a/b", "library/a/b", id="not_an_official_image"),
        pytest.param(
            "localhost:5000/team/img",
            "localhost:5000#team/img",
            "localhost:5000/team/img",
            id="localhost_with_port",
        ),
        pytest.param(
            f"host.example:5005#group/img:{DIGEST}",
            f"host.example:5005#group/img:{DIGEST}",
            f"host.example:5005/group/img@{DIGEST}",
            id="digest_in_enroot_form",
        ),
        pytest.param("[::1]:5000/img:1", "[::1]:5000#img:1", "[::1]:5000/img:1", id="ipv6"),
        pytest.param("5005:5005", "5005:5005", "5005:5005", id="tag_of_digits"),
        pytest.param(
            "harbor.example#docker.io/library/ubuntu",
            "harbor.example#docker.io/library/ubuntu",
            "harbor.example/docker.io/library/ubuntu",
            id="proxy_of_hub",
        ),
        pytest.param(
            "docker.io#foo.bar/img",
            "registry-1.docker.io#foo.bar/img",
            "docker.io/foo.bar/img",
            id="hub_path_like_a_host",
        ),
        pytest.param(
            "dockerd://team/img:1", "dockerd://team/img:1", "team/img:1", id="local_engine"
        ),
    ],
)
def test_spellings(text: str, pyxis: str, docker: str) -> None:
    reference = parse(text)
    assert reference.pyxis() == pyxis
    assert reference.enroot() == (pyxis if "://" in pyxis else f"docker://{pyxis}")
    assert reference.docker() == docker
    for spelling in (reference.docker(), reference.pyxis(), reference.enroot()):
        if reference.scheme == "docker":
            assert parse(spelling).pyxis() == pyxis
            assert parse(spelling).docker() == docker


def test_a_host_without_dot_gets_its_port_for_docker_which_would_take_it_for_a_namespace() -> None:
    reference = parse("master#busybox:1")
    assert reference.pyxis() == "master#busybox:1"
    assert reference.docker() == "master:443/busybox:1"
    assert parse(reference.docker()).docker() == reference.docker()


def test_case_1_2_port_is_no_tag_and_tag_is_kept_beside_the_digest() -> None:
    reference = parse(f"registry.example.com:5005/group/img:1.2@{DIGEST}")
    assert reference.registry == "registry.example.com:5005"
    assert (reference.path, reference.tag, reference.digest) == ("group/img", "1.2", DIGEST)


@pytest.mark.parametrize(
    ("text", "path"),
    [
        pytest.param("pyg.sqsh", "./pyg.sqsh", id="case_1_4-name"),
        pytest.param("images/pyg.sqsh", "./images/pyg.sqsh", id="case_1_4-relative"),
        pytest.param("./pyg.sqsh", "./pyg.sqsh", id="case_1_4-dot"),
        pytest.param("/lustre/img/pyg.sqsh", "/lustre/img/pyg.sqsh", id="case_1_4-absolute"),
        pytest.param("../img/pyg.sqsh", "../img/pyg.sqsh", id="parent"),
        pytest.param("nvidia+pyg+24.01-py3.sqsh", "./nvidia+pyg+24.01-py3.sqsh", id="enroot_name"),
        pytest.param("My Images/PyG.sqsh", "./My Images/PyG.sqsh", id="any_file_name"),
        pytest.param("/lustre/img/pyg", "/lustre/img/pyg", id="path_without_suffix"),
    ],
)
def test_squashfs_files(text: str, path: str) -> None:
    reference = parse(text)
    assert reference.is_file
    assert reference.pyxis() == reference.enroot() == path
    with pytest.raises(UsageError, match="squashfs file"):
        reference.docker()


def test_home_is_expanded_before_it_reaches_srun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert parse("~/pyg.sqsh").pyxis() == "/home/ada/pyg.sqsh"


def test_case_1_5_the_hash_is_quoted_in_an_sbatch_line_and_bare_for_srun() -> None:
    reference = parse("registry.example.com:5443/team/img:1")
    assert reference.pyxis() == "registry.example.com:5443#team/img:1"
    line = reference.sbatch()
    assert line == '#SBATCH --container-image="registry.example.com:5443#team/img:1"'
    # sbatch reads its lines as a shell does: quotes and backslashes go, a bare '#' ends the line.
    assert shlex.split(line.removeprefix("#SBATCH "), comments=True) == [
        f"--container-image={reference.pyxis()}"
    ]


@pytest.mark.parametrize(
    ("text", "user", "pyxis"),
    [
        (
            "$oauthtoken@nvcr.io#nvidia/pyg:24.01-py3",
            "$oauthtoken",
            "$oauthtoken@nvcr.io#nvidia/pyg:24.01-py3",
        ),
        ("ada@nvcr.io/nvidia/pyg", "ada", "ada@nvcr.io#nvidia/pyg"),
        ("ada@site.example@reg.example#img:1", "ada@site.example", None),
        (f"robot$ci+x@reg.example:5000/img@{DIGEST}", "robot$ci+x", None),
        ("ada@ubuntu:24.04", "ada", "ada@ubuntu:24.04"),
    ],
)
def test_the_user_is_kept_apart(text: str, user: str, pyxis: str | None) -> None:
    reference = parse(text)
    assert reference.user == user
    assert reference.pyxis() == (pyxis or reference.pyxis())
    assert user not in reference.docker()
    assert parse(reference.enroot()) == reference
    assert read_by_enroot_3(reference.enroot())[0] == user


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        ("", "empty"),
        ("nvcr.io/nvidia/PyG:24.01", "'PyG'"),
        ("nvcr.io/", "''"),
        ("nvcr.io//pyg", "''"),
        ("nvcr.io#nvidia#pyg", "'#pyg'"),
        ("#img", "''"),
        ("reg.example/team#img", "'reg.example/team'"),
        ("nvcr.io/nvidia/pyg:", "''"),
        ("nvcr.io/nvidia/pyg:1:2", "'1:2'"),
        ("nvcr.io/nvidia/pyg:-1", "'-1'"),
        (f"img:{'x' * 129}", f"'{'x' * 129}'"),
        ("img@sha256:abc", "'sha256:abc'"),
        (f"img@sha256:{HEX.upper()}", f"'sha256:{HEX.upper()}'"),
        (f"img@sha512:{HEX}{HEX}", "'sha512:"),
        (f"reg.example:5005#img:sha256:{HEX[:-1]}", f"'sha256:{HEX[:-1]}'"),
        ("reg.example/img@latest", "'@latest'"),
        ("docker://docker://img", "'docker://'"),
        ("https://nvcr.io/nvidia/pyg", "'https://'"),
        ("oras://reg.example/img", "'oras://'"),
        ("docker://pyg.sqsh", "'docker://'"),
        ("reg.example:port/img", "'reg.example:port'"),
        ("reg.example:70000/img", "'reg.example:70000'"),
        ("-reg.example/img", "'-reg.example'"),
        (" ubuntu", "' ubuntu'"),
        ("ubuntu:24.04\n", r"'24.04\n'"),
        ("team/im g", "'im g'"),
        (HEX, f"'{HEX}'"),
        (f"dockerd://img@{DIGEST}", f"'{DIGEST}'"),
        (f"reg.example/{'a' * 250}", f"'{'a' * 250}'"),
    ],
)
def test_malformed_is_a_usage_error_that_quotes_the_reference_and_its_bad_part(
    text: str, bad: str
) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert repr(text) in str(error.value) or not text
    assert bad in str(error.value)
    assert error.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "ada:hunter2@reg.example/img:1",
        "docker://ada:hunter2@reg.example#img",
        "https://ada:hunter2@reg.example/img",
        "ada:hunter2/x@y@reg.example/img",
    ],
)
def test_a_password_in_a_reference_is_refused_and_not_shown(text: str) -> None:
    with pytest.raises(UsageError) as error:
        parse(text)
    assert "hunter2" not in str(error.value)
    assert "ada" in str(error.value)


@pytest.mark.parametrize(
    ("text", "target"),
    [
        pytest.param(
            "reg.example.com:5005/group/img:1",
            ("reg.example.com:5005/group/img", "1"),
            id="case_9_6-port_and_tag",
        ),
        pytest.param(
            "reg.example.com:5005/group/img",
            ("reg.example.com:5005/group/img", "latest"),
            id="case_9_6-port_no_tag",
        ),
        pytest.param("team/img:1", ("team/img", "1"), id="case_9_6-hub"),
    ],
)
def test_a_push_always_has_a_tag(text: str, target: tuple[str, str]) -> None:
    assert parse(text).push_target() == target


def test_a_push_to_a_digest_is_refused() -> None:
    with pytest.raises(UsageError, match=r"write reg\.example/img:latest"):
        parse(f"reg.example/img@{DIGEST}").push_target()


alphanumeric = st.text(string.ascii_lowercase + string.digits, min_size=1, max_size=6)
component = st.builds(
    lambda first, rest: first + "".join(separator + word for separator, word in rest),
    alphanumeric,
    st.lists(st.tuples(st.sampled_from([".", "_", "__", "-", "---"]), alphanumeric), max_size=2),
)
path = st.lists(component, min_size=1, max_size=3).map("/".join)
label = st.text(string.ascii_letters + string.digits, min_size=1, max_size=6)
host = st.one_of(
    st.lists(label, min_size=2, max_size=3).map(".".join),
    st.just("localhost"),
    st.builds("{}:{}".format, label, st.integers(1, 65535)),
)
tag = st.from_regex(r"[a-zA-Z0-9_][a-zA-Z0-9_.-]{0,8}", fullmatch=True)
digest = st.text("0123456789abcdef", min_size=64, max_size=64).map("sha256:".__add__)
user = st.from_regex(r"[a-zA-Z0-9_.!$+-]{1,8}(@[a-z.]{1,8})?", fullmatch=True)


@st.composite
def docker_references(draw: st.DrawFn) -> str:
    registry = draw(st.one_of(st.just(""), host.map("{}/".format)))
    version = draw(
        st.one_of(
            st.just(""),
            tag.map(":{}".format),
            digest.map("@{}".format),
            st.builds(":{}@{}".format, tag, digest),
        )
    )
    # Without a registry, a first part with a dot would be one.
    on_hub = st.one_of(component, st.builds("{}/{}".format, alphanumeric, path))
    return f"{registry}{draw(path if registry else on_hub)}{version}"


@given(docker_references())
def test_docker_to_enroot_to_docker_is_the_identity(text: str) -> None:
    if text.endswith((".sqsh", ".squashfs")) or re.search(r"(^|/)[0-9a-f]{64}$", text):
        return
    reference = parse(text)
    canonical = reference.docker()
    assert parse(reference.enroot()).docker() == canonical
    assert parse(reference.pyxis()).pyxis() == reference.pyxis()
    assert parse(canonical).docker() == canonical
    assert parse(canonical).enroot() == reference.enroot()
    assert reference.pyxis().count("#") <= 1

    # What enroot 3.5.0 would fetch is what Docker names.
    _, registry, image, version = read_by_enroot_3(reference.enroot())
    assert (registry or "docker.io") in {reference.registry, "registry-1.docker.io"}
    assert image in {reference.path, reference.path.removeprefix("library/")}
    assert version == (reference.digest or reference.tag)


@given(user, docker_references())
def test_a_user_changes_nothing_else(name: str, text: str) -> None:
    if text.endswith((".sqsh", ".squashfs")):
        return
    plain, with_user = parse(text), parse(f"{name}@{text}")
    assert with_user.user == name
    assert with_user.docker() == plain.docker()
    assert with_user.pyxis() == f"{name}@{plain.pyxis()}"
    assert parse(with_user.enroot()).user == name


@given(st.text(max_size=40))
def test_any_text_is_a_reference_or_a_usage_error(text: str) -> None:
    try:
        reference = parse(text)
    except UsageError:
        return
    assert parse(reference.pyxis()).pyxis() == reference.pyxis()
