"""GPUs against the installed torch: a build that cannot use them, a driver that does not answer, TF32.

Run: pytest tests/doctor/test_gpus.py -n 0. The driver's tool and Python are scripts; not covered: real GPUs.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from dsaccum.doctor import gpus
from dsaccum.doctor.finding import Finding
from dsaccum.doctor.gpus import check_gpus
from dsaccum.doctor.machine import Answer
from dsaccum.doctor.torch_build import TorchBuild
from tests.doctor import planting

TWO = "echo 'NVIDIA H200, 143771 MiB, 570.86'; echo 'NVIDIA H200, 143771 MiB, 570.86'"
SEES = '{"devices": 2, "matmul_tf32": false, "cudnn_tf32": true}'


def look(root: Path, **environment: str) -> list[Finding]:
    return list(check_gpus(planting.machine(root, environment)))


def gpu(root: Path, **environment: str) -> Finding:
    return planting.only(look(root, **environment), "GPUs")


def card(root: Path) -> None:
    """On the bus, with two other devices."""
    for place, vendor, kind in (("0", "0x10de", "0x030200"), ("1", "0x10de", "0x040300"), ("2", "0x1002", "0x030000")):
        planting.write(root, {f"sys/bus/pci/devices/{place}/vendor": f"{vendor}\n",
                              f"sys/bus/pci/devices/{place}/class": f"{kind}\n"})  # fmt: skip


@pytest.fixture
def answering(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A Python whose torch says what SAYS holds."""
    planting.command(root, "python-with-torch", 'echo "a line of a library"; echo "$SAYS"; echo "$COMPLAINS" >&2')
    monkeypatch.setattr(gpus.sys, "executable", str(root / "bin/python-with-torch"))


def test_none_and_a_cpu_build(root: Path, site: Path) -> None:
    planting.torch(site)
    assert gpu(root) == Finding("GPUs", "none; ranks run on the CPU")


def test_none_and_a_cuda_build_is_a_note(root: Path, site: Path) -> None:
    planting.torch(site, "2.13.0", cuda="13.0")
    finding = gpu(root)
    assert (finding.state, finding.found) == ("note", "none, and torch is a CUDA 13.0 build")


def test_gpus_that_a_cpu_build_cannot_use(root: Path, site: Path) -> None:
    planting.torch(site)
    planting.command(root, "nvidia-smi", TWO)
    finding = gpu(root)
    assert (finding.state, finding.found) == ("problem", "2 x NVIDIA H200, 143771 MiB, 570.86")
    assert "2.13.0+cpu is a CPU build" in finding.consequence
    assert finding.fix.endswith("-m pip install torch==2.13.0")


@pytest.mark.parametrize("said", [{"DS_ACCELERATOR": "cpu"}, {"CUDA_VISIBLE_DEVICES": ""}])
def test_gpus_that_are_not_wanted(said: dict[str, str], root: Path, site: Path) -> None:
    planting.torch(site)
    planting.command(root, "nvidia-smi", TWO)
    finding = gpu(root, **said)
    assert finding.state == "ok"
    assert "not used" in finding.found


@pytest.mark.usefixtures("answering")
def test_gpus_that_torch_sees(root: Path, site: Path) -> None:
    planting.torch(site, "2.13.0", cuda="13.0")
    planting.command(root, "nvidia-smi", TWO)
    findings = look(root, SAYS=SEES)
    assert planting.states(findings) == {"GPUs": "ok", "TF32": "ok", "ranks": "ok"}
    assert planting.only(findings, "GPUs").found.endswith("torch is a CUDA 13.0 build and sees 2")
    assert planting.only(findings, "TF32").found == "off for matrix products, on for convolutions"
    assert planting.only(findings, "ranks").found.startswith("dsaccum verify starts 2, deepspeed 2;")


@pytest.mark.usefixtures("answering")
@pytest.mark.parametrize("how", [{"SAYS": SEES.replace("false", "true")}, {"SAYS": SEES, "NVIDIA_TF32_OVERRIDE": "1"}])
def test_tf32_is_a_note(how: dict[str, str], root: Path, site: Path) -> None:
    planting.torch(site, "2.13.0", cuda="13.0")
    planting.command(root, "nvidia-smi", TWO)
    finding = planting.only(look(root, **how), "TF32")
    assert (finding.state, finding.found) == ("note", "on for matrix products, on for convolutions")
    assert finding.fix == "unset NVIDIA_TF32_OVERRIDE TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"


@pytest.mark.usefixtures("answering")
def test_a_driver_that_is_too_old_for_torch(root: Path, site: Path) -> None:
    planting.torch(site, "2.13.0", cuda="13.0")
    planting.command(root, "nvidia-smi", TWO)
    findings = look(root, SAYS=SEES.replace("2", "0", 1), COMPLAINS="The NVIDIA driver on your system is too old")
    finding = planting.only(findings, "GPUs")
    assert (finding.state, "TF32" in planting.states(findings)) == ("problem", False)
    assert finding.consequence.endswith("cannot use them: The NVIDIA driver on your system is too old; ranks run on "
                                        "the CPU")  # fmt: skip


def test_a_torch_that_cannot_be_asked(root: Path, site: Path) -> None:
    planting.torch(site, "2.13.0", cuda="13.0")  # which raises when it is imported
    planting.command(root, "nvidia-smi", TWO)
    finding = gpu(root, PYTHONPATH=str(site))
    assert finding.state == "problem"
    assert finding.consequence.endswith("does not say what it sees: ImportError: torch was imported")


def test_a_driver_that_does_not_answer(root: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    card(root)
    planting.command(root, "nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9")
    for cuda, state in (("13.0", "problem"), (None, "note")):
        planting.torch(site, cuda=cuda)
        finding = gpu(root)
        assert (finding.state, finding.found) == (state, "1 x NVIDIA, without a driver that answers")
        assert finding.consequence == "ranks run on the CPU: NVIDIA-SMI has failed"
        assert finding.fix.startswith("sudo modprobe nvidia")
    monkeypatch.setattr(gpus, "_DRIVER_S", 0.2)
    planting.command(root, "nvidia-smi", "exec /bin/sleep 60")
    assert gpu(root).consequence == "ranks run on the CPU: no answer within 0.2 s"


def test_a_card_that_was_not_passed_on_to_a_container(root: Path, site: Path) -> None:
    planting.torch(site, cuda="13.0")
    card(root)
    planting.write(root, {".dockerenv": ""})
    finding = gpu(root)
    assert finding.state == "note"
    assert finding.fix.startswith("docker run --gpus all")


def test_cuda_is_asked_for_and_there_is_none(root: Path, site: Path) -> None:
    planting.torch(site)
    finding = gpu(root, DS_ACCELERATOR="cuda")
    assert (finding.state, finding.fix) == ("problem", "unset DS_ACCELERATOR")


def test_without_torch_it_still_says_what_is_there(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planting.command(root, "nvidia-smi", TWO)
    monkeypatch.setattr("dsaccum.doctor.torch_build.package_folder", lambda name: None)
    assert gpu(root) == Finding("GPUs", "2 x NVIDIA H200, 143771 MiB, 570.86; there is no torch")


def test_ranks_where_there_is_no_gpu(root: Path, site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planting.torch(site)
    for cores, ranks in ((8, 2), (1, 1)):
        monkeypatch.setattr(gpus, "usable_cores", lambda cores=cores: cores)
        found = planting.only(look(root), "ranks").found
        assert found.startswith(f"dsaccum verify starts {ranks}, deepspeed 1;")


def test_the_build_is_read_and_not_imported(site: Path) -> None:
    for tag, versions in (("cu130", {"cuda": "13.0"}), ("rocm62", {"hip": "6.2"}), ("cpu", {})):
        planting.torch(site, "2.13.0", **versions)
        build = TorchBuild.installed()
        assert build is not None
        assert (build.folder, build.version, build.tag) == (site / "torch", "2.13.0", tag)


def test_the_installed_torch_says_the_same_of_itself() -> None:
    import torch

    build = TorchBuild.installed()
    assert build is not None
    assert (build.version, build.cuda, build.hip) == (torch.__version__, torch.version.cuda, torch.version.hip)
    assert build.folder == Path(torch.__file__).parent


def test_what_torch_is_asked_it_can_answer(capsys: pytest.CaptureFixture[str]) -> None:
    """The question for real, on whatever machine this is."""
    exec(gpus._ASK_TORCH, {})
    answer = Answer(0, capsys.readouterr().out)
    assert set(gpus._read(answer)) == {"devices", "matmul_tf32", "cudnn_tf32"}
