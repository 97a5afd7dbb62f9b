"""The whole engine in processes of its own: entry points, scheduler (prefix caching, async scheduling), worker."""

from tests.ascend import support


def test_llm_without_and_with_replay():
    """`LLM(...)`: without the package, with it, lossless in graphs; the demo compares and exits accordingly."""
    run = support.run_python(str(support.ROOT / "examples" / "ascend_demo.py"))
    assert run.returncode == 0, run.stdout + run.stderr[-3000:]
    assert "rows dropped: yes" in run.stdout
    assert "replay batches of the exact run out of graphs: yes" in run.stdout
    assert "exact equals the run without the package: yes" in run.stdout
    assert run.stdout.count("ReplayAscendDeepseekV41ForCausalLM") == 2


def test_switched_off_by_the_environment():
    """ASCEND_REPLAY=0: the entry point runs and leaves vLLM and vllm-ascend as they are."""
    code = (
        "from tests.npu_emulator import activate; activate()\n"
        "from tests.ascend import support\n"
        "import vllm.plugins\n"
        "support.remember_originals()\n"
        "vllm.plugins.plugins_loaded = False\n"
        "import os; os.environ['VLLM_PLUGINS'] = 'ascend,ascend_model,vllm_ascend_replay'\n"
        "import vllm.envs; loaded = vllm.plugins.load_plugins_by_group('vllm.general_plugins')\n"
        "assert 'vllm_ascend_replay' in loaded, loaded\n"
        "for value in '01':\n"
        "    os.environ['ASCEND_REPLAY'] = value\n"
        "    [load() for load in loaded.values()]\n"
        "    print(value, 'untouched', support.is_untouched())\n"
    )
    run = support.run_python("-c", code)
    said = [line for line in run.stdout.splitlines() if "untouched" in line]
    assert said == ["0 untouched True", "1 untouched False"], run.stdout + run.stderr[-3000:]
