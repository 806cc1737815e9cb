"""The command line of the operator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kerf_operator.__main__ import cli
from kerf_operator.errors import SettingsError
from kerf_operator.settings import Settings

ROOT = Path(__file__).parents[2]
EXAMPLE = str(ROOT / "examples" / "smollm2.yaml")


def kerf_operator(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The program itself, which knows no cluster."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("KUBE")}
    return subprocess.run(
        [sys.executable, "-m", "kerf_operator", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
        check=False,
    )


def test_render_prints_what_a_resource_leads_to() -> None:
    result = CliRunner().invoke(
        cli, ["render", "-f", EXAMPLE, "-n", "team", "--runtime-image", "i:1"]
    )
    assert result.exit_code == 0, result.output
    objects = list(yaml.safe_load_all(result.output))
    assert [obj["kind"] for obj in objects] == [
        "PersistentVolumeClaim",
        "CompileCache",
        "Job",
        "Deployment",
        "Service",
    ]
    assert {obj["metadata"]["namespace"] for obj in objects} == {"team"}
    assert "ownerReferences" not in result.output
    assert "&id" not in result.output


def test_render_names_the_wrong_field(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text(Path(EXAMPLE).read_text().replace("float32", "int3"))
    done = kerf_operator("render", "-f", str(path), "--json")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: ")
    assert "engine.dtype" in done.stderr
    assert json.loads(done.stdout)["error"]["reason"] == "Config"


def test_wrong_usage_is_2_and_with_json_also_on_standard_output() -> None:
    done = kerf_operator("render", "--json")
    assert done.returncode == 2
    assert "Usage: kerf-operator render" in done.stderr
    assert json.loads(done.stdout)["error"] == {
        "reason": "Usage",
        "message": "Missing option '-f' / '--file'.",
        "exitCode": 2,
    }


def test_render_without_an_image_says_which_option_names_it() -> None:
    done = kerf_operator("render", "-f", EXAMPLE, "--runtime-image", "")
    assert done.returncode == 2
    assert done.stderr.startswith("Error: --runtime-image: no runtime image")


def test_crds_prints_and_writes_the_same(tmp_path: Path) -> None:
    printed = CliRunner().invoke(cli, ["crds"])
    written = CliRunner().invoke(cli, ["crds", "--write", "--folder", str(tmp_path)])
    assert written.exit_code == 0
    names = {doc["metadata"]["name"] for doc in yaml.safe_load_all(printed.output)}
    assert names == {"modeldeployments.kerf.dev", "compilecaches.kerf.dev"}
    assert {
        yaml.safe_load(path.read_text())["metadata"]["name"] for path in tmp_path.iterdir()
    } == names


def test_run_without_a_cluster_says_what_to_do(tmp_path: Path) -> None:
    done = kerf_operator("run", "--runtime-image", "i", "--kubeconfig", str(tmp_path / "none"))
    assert done.returncode == 8
    assert "--kubeconfig" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"runtime_image": ""}, "--runtime-image"),
        ({"namespaces": ("Team",)}, "--namespace"),
        ({"resync_seconds": 0.1}, "--resync-seconds"),
        ({"workers": 0}, "--workers"),
    ],
)
def test_wrong_settings_name_their_flag(options: dict[str, object], word: str) -> None:
    with pytest.raises(SettingsError, match=word):
        Settings(**{"runtime_image": "i", **options})  # type: ignore[arg-type]


def test_nothing_shadows_the_operator_module_of_the_standard_library() -> None:
    assert not (ROOT / "operator" / "__init__.py").exists()
    assert not (ROOT / "tests" / "operator" / "__init__.py").exists()
    done = subprocess.run(
        [sys.executable, "-c", "import operator; operator.itemgetter"],
        cwd=ROOT,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0


def test_the_commands_that_need_no_cluster_import_no_client() -> None:
    code = "import sys, kerf_operator.__main__; assert not {'kopf', 'kubernetes', 'torch'} & set(sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
