#!/usr/bin/env python3
"""gpu/run.sh and gpu/page.py without a GPU: run_test.py FAKE_CUDA_FOLDER KERNEL_BW.

The programs that run.sh starts are
stand-ins, in a folder as `./run gpu pack` makes it; what is tested is what it makes of them."""
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent.parent
FAKE_CUDA, KERNEL_BW = sys.argv[1:3]
ENVIRONMENT = {**os.environ, "LD_LIBRARY_PATH": FAKE_CUDA}


class Gpu(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def probe(self, stand_in, **environment):
        """`run.sh probe`, which has one step, with this script as the probe."""
        (self.folder / "bin").mkdir()
        shutil.copy(HERE / "run.sh", self.folder)
        program = self.folder / "bin" / "rejoin_gpu_probe"
        program.write_text("#!/bin/sh\n" + stand_in)
        program.chmod(0o755)
        return subprocess.run(["bash", self.folder / "run.sh", "probe"], env={**ENVIRONMENT, **environment}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)

    def test_a_step_that_passes_is_in_the_table(self):
        ran = self.probe("echo '   64  1.5'\n")
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertRegex(ran.stdout, r"\npassed +what the driver does while streams wait.* s; 64 1\.5\n")
        self.assertTrue(ran.stdout.endswith("gpu probe: passed\n"), ran.stdout)

    def test_a_step_that_fails_has_its_status_in_the_table_and_fails_the_whole(self):
        ran = self.probe("exit 3\n")
        self.assertEqual(ran.returncode, 1, ran.stdout)
        self.assertRegex(ran.stdout, r"\nFAILED \(3\) +what the driver does")
        self.assertIn("gpu probe: 1 of 1 steps failed\n", ran.stdout)

    def test_a_step_that_hangs_is_killed_and_shows_where_it_stood(self):
        ran = self.probe("echo $$ > \"$PID_FILE\"\nexec sleep 1000\n", STEP_LIMIT="2", PID_FILE=str(self.folder / "pid"))
        self.assertEqual(ran.returncode, 1, ran.stdout)
        pid = (self.folder / "pid").read_text().strip()
        self.assertRegex(ran.stdout, rf"-- stuck: {pid} sleep 1000")
        self.assertRegex(ran.stdout, r"\nHANGS +what the driver does.* killed after 2 s\n")
        self.assertFalse(pathlib.Path(f"/proc/{pid}").exists(), "it lives on")

    def page(self, **files):
        for name, content in files.items():
            (self.folder / f"{name}.json").write_text(content if isinstance(content, str) else json.dumps(content))
        return subprocess.run([sys.executable, HERE / "page.py", self.folder, "a <card>"], text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)

    def test_the_page_has_each_figure_and_leaves_out_what_is_no_json(self):
        files = {
            "write-tcp-GPU-1M": {"results": [{"BW_average": 2048}]},
            "allreduce-shm-host": {"rows": [{"bytes": 1 << 20, "seconds": 0.0125}]},
            "catchup-tcp-host": {"runs": [{"verified_gbps": gbps} for gbps in (1, 3.5, 9)]},
            "kernels": {"rows": [{"what": "add", "blocks": 4, "chunk": 65536, "gigabytes_per_second": 77.7, "ratio": 0.42}]},
            "probe": {"served": {"trainer_alone": 10, "trainer": 8, "trainer_time_ratio": 1.25, "daemon_alone": 4,
                                 "daemon": 2, "daemon_rate_ratio": 0.5},
                      "stands_still": [{"does": "cudaFree", "call": "a launch", "stands": True},
                                       {"does": "cudaMalloc", "call": "a launch", "stands": False}]},
        }
        ran = self.page(**files, broken="{")
        self.assertEqual(ran.returncode, 0, ran.stdout)
        self.assertIn("broken.json is left out", ran.stdout)
        page = (self.folder / "bench.html").read_text()
        for what in ("a &lt;card&gt;", "2 GiB/s", "12.5 ms", "3.5 GB/s", "4 blocks, works of 64 KiB", "77.7", "0.42",
                     "1.25 × the time", "0.50 of the rate", "cudaFree"):
            self.assertIn(what, page)
        self.assertNotIn("cudaMalloc", page)
        self.assertEqual(json.loads((self.folder / "bench.json").read_text()), {"card": "a <card>", "results": files})

    def test_nccls_figures_stand_beside_each_other(self):
        line = "{:<12} {:>12} B {:>12.1f} us {:>9.3f} GB/s  right\n"
        for net, time in (("Rejoin", 20.5), ("sockets", 31.0)):
            text = "warning: of NCCL\n" + line.format("broadcast", 4, time, 0.1) + line.format("all_reduce", 1 << 20, 2 * time, 1)
            (self.folder / f"nccl-{net}.txt").write_text(text)
        self.assertEqual(self.page().returncode, 0)
        page = (self.folder / "bench.html").read_text()
        self.assertIn("<td>broadcast</td><td>4 B</td><td>20.5</td><td>31.0</td>", page)
        self.assertIn("<td>all-reduce</td><td>1 MiB</td><td>41.0</td><td>62.0</td>", page)

    def test_a_folder_without_results_is_refused(self):
        ran = self.page()
        self.assertEqual(ran.returncode, 1)
        self.assertIn("no results in", ran.stdout)

    def test_the_kernels_figures_and_picture_go_into_the_page(self):
        picture = self.folder / "kernels.svg"
        ran = subprocess.run([KERNEL_BW, "-s", "4M", "-n", "1", "--blocks", "2,3", "--chunk", "64K,1M", "--json", "--svg",
                              picture], env=ENVIRONMENT, text=True, capture_output=True, check=False)
        self.assertEqual(ran.returncode, 0, ran.stderr)
        rows = json.loads(ran.stdout)["rows"]
        added = {(row["blocks"], row["chunk"]) for row in rows if row["what"] == "add"}
        self.assertEqual(added, {(2, 65536), (2, 1 << 20), (3, 65536), (3, 1 << 20)})
        self.assertEqual({row["what"] for row in rows}, {"copy", "digest", "add", "code8", "code4", "decode8", "decode4"})
        self.assertTrue(all(row["gigabytes_per_second"] > 0 for row in rows), rows)
        self.assertTrue(picture.read_text().lstrip().startswith("<svg"))
        self.assertEqual(self.page(kernels=ran.stdout).returncode, 0)
        self.assertIn(picture.read_text(), (self.folder / "bench.html").read_text())


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
