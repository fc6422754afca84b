"""The VM rig: Debian's kernel with soft-RoCE under QEMU's emulation, so that the verbs backend meets real RDMA verbs, and
tcp+aes a kernel that encrypts (kTLS).

    rig.py test [--filter F]   boots one VM, has 'rejoin doctor' find what is broken of its RDMA devices, and runs the
                               transport's tests over them
    rig.py doctor              the first of these alone
    rig.py demo                runs the demo over several VMs as nodes; one loses power and comes back
    rig.py bench               perftest's tools and ours side by side in one
    rig.py encryption          TCP as it is, encrypted by the processes, and by the kernel, side by side in one
    rig.py instructions        counts both tools' instructions for each write
    rig.py run -- COMMAND      runs a shell command in one
    rig.py shell               gives a prompt in one

The image (kernel modules, busybox, what the programs need) is made once and cached in build/vm.
"""
import argparse
import ctypes
import functools
import hashlib
import lzma
import mmap
import os
import pathlib
import platform
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
CACHE = ROOT / "build" / "vm"
BIN = ROOT / "build" / "release" / "bin"
SKIPPED = 77  # as automake and ctest have it

# Loading order is found by modprobe; these are the ends of the chains.
MODULES = """crc32_generic crc32-pclmul virtio_pci virtio_net veth udp_tunnel ip6_udp_tunnel ib_uverbs rdma_rxe
rdma_ucm aesni-intel ghash-clmulni-intel gcm ctr tls""".split()
TOOLS = """/usr/bin/ip /usr/bin/rdma /usr/bin/ibv_devinfo /usr/bin/ib_write_bw /usr/bin/ib_read_bw /usr/bin/ib_write_lat
/usr/bin/ib_send_lat /usr/bin/rping""".split()
NEEDED = {"qemu-system-x86_64": "qemu-system-x86", "busybox": "busybox-static", "cpio": "cpio", "modprobe": "kmod",
          "rdma": "iproute2", "ib_write_bw": "perftest", "rping": "rdmacm-utils", "ibv_devinfo": "ibverbs-utils"}


def which(name):
    return shutil.which(name, path=os.environ.get("PATH", "") + ":/usr/sbin:/sbin:/bin:/usr/bin")


def skip(why):
    print(f"vm: SKIPPED: {why}")
    sys.exit(SKIPPED)


def check_tools():
    if platform.machine() != "x86_64":
        skip(f"this machine's programs are to run in the VM, which is an x86-64, and this is {platform.machine()}")
    missing = sorted({package for tool, package in NEEDED.items() if which(tool) is None})
    if missing:
        skip(f"the rig needs Debian's {' '.join(missing)}; as root './run packages' installs them")


def kernel():
    """The kernel image and its module tree, downloaded and unpacked once."""
    tree = CACHE / "kernel"
    found = sorted(tree.glob("boot/vmlinuz-*"))
    if not found:
        depends = subprocess.run(["apt-cache", "depends", "linux-image-amd64"], capture_output=True, text=True)
        name = re.search(r"Depends: (linux-image-\S+)", depends.stdout)
        if not name:
            skip("apt knows no linux-image-amd64; it is Debian's kernel that is booted")
        with tempfile.TemporaryDirectory() as scratch:
            got = subprocess.run(["apt-get", "download", name[1]], cwd=scratch, capture_output=True, text=True)
            packages = list(pathlib.Path(scratch).glob("*.deb"))
            if got.returncode != 0 or not packages:
                skip(f"can't download {name[1]}: {got.stderr.strip()}")
            partial = CACHE / "kernel.partial"
            shutil.rmtree(partial, ignore_errors=True)
            subprocess.run(["dpkg", "-x", packages[0], partial], check=True)
            partial.rename(tree)
        found = sorted(tree.glob("boot/vmlinuz-*"))
    return unpacked(found[0]), found[0].name.removeprefix("vmlinuz-")


def unpacked(vmlinuz):
    """The ELF file in a bzImage (the kernel's Documentation/x86/boot.rst): QEMU boots it by its PVH entry, and no emulated
    processor has to unpack it, which takes longer than all else of the boot."""
    vmlinux = vmlinuz.with_name(vmlinuz.name.replace("vmlinuz", "vmlinux"))
    if not vmlinux.exists():
        image = vmlinuz.read_bytes()
        offset, length = struct.unpack_from("<II", image, 0x248)
        start = (image[0x1F1] + 1) * 512 + offset
        try:
            # Behind the archive stands the size that it unpacks to.
            kernel = lzma.decompress(image[start : start + length - 4])
        except lzma.LZMAError:
            return vmlinuz  # packed in another way: it unpacks itself
        partial = vmlinux.with_name(vmlinux.name + ".partial")
        partial.write_bytes(kernel)
        partial.rename(vmlinux)
    return vmlinux


@functools.cache
def tsc_khz():
    """How fast this machine's time stamp counter, which the VM sees, counts. A kernel that finds out by itself on a busy
    machine is wrong by a factor of up to six now and then, and so are its clocks."""
    code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(b"\x0f\x31\x48\xc1\xe2\x20\x48\x09\xd0\xc3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
    rdtsc = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(ctypes.c_char.from_buffer(code)))

    def now():
        looks = []
        for _ in range(100):
            before = time.monotonic_ns()
            ticks = rdtsc()
            looks.append((time.monotonic_ns() - before, before, ticks))
        return min(looks)[1:]

    start, first = now()
    time.sleep(0.1)
    end, last = now()
    return (last - first) * 1_000_000 // (end - start)


def libraries(program):
    listed = subprocess.run(["ldd", program], capture_output=True, text=True).stdout
    return re.findall(r"(/\S+\.so\S*)", listed)


def loaded_at_run_time():
    """What ldd does not tell of the project's programs: the vendors' libraries, as far as they are here."""
    cache = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True).stdout
    return re.findall(r"=> (/\S+/(?:libibverbs\.so\.1|librdmacm\.so\.1|libuc[ps]\.so\.0))$", cache, re.MULTILINE)


class Tree:
    """A directory that becomes part of the initial file system."""

    def __init__(self, path):
        self.path = pathlib.Path(path)

    def put(self, source, to=None):
        target = self.path / str(to or source).lstrip("/")
        if target.exists():
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, target)
        os.chmod(target, 0o755)

    def program(self, source, to=None):
        self.put(source, to)
        for library in libraries(source):
            self.put(library)

    def pack(self, to):
        names = subprocess.run(["find", "."], cwd=self.path, capture_output=True, check=True).stdout
        with open(to, "wb") as archive:
            subprocess.run(["cpio", "-o", "-H", "newc", "--quiet"], cwd=self.path, input=names, stdout=archive, check=True)


def base_image():
    """Everything but the project's own programs; made again when this file or the kernel changes."""
    image_of_kernel, version = kernel()
    key = hashlib.sha256((pathlib.Path(__file__).read_bytes() + version.encode())).hexdigest()[:16]
    image = CACHE / f"base-{key}.cpio"
    if not image.exists():
        for old in CACHE.glob("base-*.cpio"):
            old.unlink()
        with tempfile.TemporaryDirectory() as scratch:
            tree = Tree(scratch)
            for directory in "proc sys dev tmp bin sbin usr/bin etc modules root".split():
                (tree.path / directory).mkdir(parents=True, exist_ok=True)
            tree.put(which("busybox"), "/bin/busybox")
            root = CACHE / "kernel"
            subprocess.run(["depmod", "-b", root, version], check=True)
            order = []
            for module in MODULES:
                listed = subprocess.run([which("modprobe"), "-d", root, "-S", version, "-D", module], check=True,
                                        capture_output=True, text=True).stdout
                for path in re.findall(r"insmod (\S+)", listed):
                    if path not in order:
                        order.append(path)
            for path in order:
                tree.put(path, "/modules/" + os.path.basename(path))
            (tree.path / "modules.order").write_text("\n".join(os.path.basename(path) for path in order) + "\n")
            for tool in TOOLS:
                real = which(os.path.basename(tool))
                tree.program(real, "/usr/bin/" + os.path.basename(tool))
            for driver in pathlib.Path("/usr/lib/x86_64-linux-gnu/libibverbs").glob("librxe-*.so"):
                tree.program(driver)
            tree.put("/etc/libibverbs.d/rxe.driver")
            tree.put("/lib/x86_64-linux-gnu/libgcc_s.so.1")  # pthread_exit loads it
            tree.pack(image)
    return image_of_kernel, image


def hidden_by_init():
    """What init.sh mounts over the image. Nothing else may be: a program's libraries lie there where they lie here, those
    of a clone under /tmp, too."""
    mounted = set(re.findall(r"^mount .* (/\S+)$", (ROOT / "vm" / "init.sh").read_text(), re.MULTILINE))
    return sorted(mounted - {"/proc", "/sys", "/dev", "/dev/shm"})


def prepare(job, programs, *, node=None, network=(), memory=2048, shell=False, files=()):
    """The QEMU command of a VM that runs the shell script `job`, and its image, to be removed afterwards."""
    if hidden := hidden_by_init():
        raise SystemExit(f"vm: init.sh mounts something over {', '.join(hidden)}, where the image may have files")
    vmlinux, base = base_image()
    with tempfile.TemporaryDirectory() as scratch:
        tree = Tree(scratch)
        tree.put(ROOT / "vm" / "init.sh", "/init")
        sanitizer = os.environ.get("ASAN_OPTIONS")  # as outside
        (tree.path / "job.sh").write_text((f"export ASAN_OPTIONS={shlex.quote(sanitizer)}\n" if sanitizer else "") + job)
        for program in programs:
            tree.program(program, "/usr/bin/" + os.path.basename(program))
        for library in loaded_at_run_time():
            tree.program(library)
        for source, to in files:
            tree.put(source, to)
        handle, image = tempfile.mkstemp(prefix="rejoin-vm-", suffix=".cpio")
        os.close(handle)
        tree.pack(image)
        with open(image, "ab") as out:  # the kernel unpacks archives one after the other
            out.write(base.read_bytes())
    # tsc: otherwise every look at the clock is a system call that reads an emulated timer.
    append = f"console=ttyS0 quiet panic=-1 mitigations=off net.ifnames=0 tsc=reliable tsc_early_khz={tsc_khz()}"
    append += f" rejoin.node={node}" if node is not None else ""
    append += " rejoin.shell=1" if shell else ""
    command = [which("qemu-system-x86_64"), "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2" if node is None else "1",
               "-m", str(memory), "-nographic", "-no-reboot", "-kernel", str(vmlinux), "-initrd", image, "-append", append]
    command += list(network) if network else ["-net", "none"]
    # Whoever has started it may be killed.
    return ([setpriv, "--pdeathsig", "KILL"] if (setpriv := which("setpriv")) else []) + command, image


def one(job, programs, limit, shell=False, files=()):
    command, image = prepare(job, programs, shell=shell, files=files)
    started = time.monotonic()
    try:
        if shell:
            return subprocess.run(command).returncode
        machine = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                   errors="replace")
        verdict = None
        out_of_time = threading.Timer(limit, lambda: (print(f"vm: stopped after {limit} s"), machine.kill()))
        out_of_time.start()
        try:
            for line in machine.stdout:
                line = line.rstrip("\r\n")
                if match := re.match(r"vm-verdict (\d+)", line):
                    verdict = int(match[1])
                elif "\x1b[" not in line or line.startswith("["):
                    print(line, flush=True)
        finally:
            out_of_time.cancel()
            machine.kill()
            machine.wait()
        print(f"vm: {time.monotonic() - started:.1f} s")
        if verdict is None:
            print("vm: it ended without a verdict")
            return 1
        return verdict
    finally:
        os.unlink(image)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["test", "doctor", "demo", "nccl", "bench", "encryption", "instructions", "run",
                                            "shell"])
    parser.add_argument("--filter", default="*ibverbs*:*Ibverbs*:*by_the_kernel*:KernelRecords.*:TcpEngines.*", help="of the tests, as gtest has it")
    parser.add_argument("--preset", default="release", help="the build whose programs run, e.g. asan")
    parser.add_argument("--limit", type=int, default=600, help="seconds until the VM is ended")
    parser.add_argument("--nodes", type=int, default=3, choices=[2, 3], help="VMs of the demo")
    parser.add_argument("rest", nargs="*")
    arguments = parser.parse_args()
    global BIN
    BIN = ROOT / "build" / arguments.preset / "bin"
    CACHE.mkdir(parents=True, exist_ok=True)
    check_tools()
    programs = [BIN / name for name in ("transport_test", "rejoin_allreduce_perf", "rejoin_catchup_bw", "rejoin_write_bw",
                                        "rejoin_read_bw", "rejoin_write_lat", "rejoin_send_lat") if (BIN / name).exists()]
    if arguments.command == "demo":
        import demo
        return demo.run(nodes=arguments.nodes, limit=arguments.limit)
    doctor, examined = (ROOT / "vm" / "doctor.sh").read_text(), [BIN / "rejoin", which("setpriv")]
    if arguments.command == "doctor":
        return one(doctor, examined, arguments.limit)
    if arguments.command == "shell":
        return one("", programs, arguments.limit, shell=True)
    if arguments.command in ("bench", "encryption"):
        return one((ROOT / "vm" / f"{arguments.command}.sh").read_text(), programs, arguments.limit)
    if arguments.command == "instructions":
        if which("valgrind.bin") is None:
            skip("it counts with Debian's valgrind; install that")
        counter = pathlib.Path("/usr/libexec/valgrind")
        files = [(counter / name, None) for name in ("cachegrind-amd64-linux", "vgpreload_core-amd64-linux.so", "default.supp")]
        return one((ROOT / "vm" / "instructions.sh").read_text(), programs + [which("valgrind.bin")], arguments.limit, files=files)
    if arguments.command == "nccl":
        plugin = BIN.parent / "lib" / "libnccl-net-rejoin.so"
        return one((ROOT / "vm" / "nccl.sh").read_text(), [BIN / "rejoin_nccl_net_test"], arguments.limit,
                   files=[(plugin, "/usr/lib/libnccl-net-rejoin.so")] + [(library, None) for library in libraries(plugin)])
    if arguments.command == "run":
        return one(" ".join(arguments.rest) + "\n", programs, arguments.limit)
    also = examined if examined[0].exists() else []  # not under sanitizers
    job = f"(\n{doctor}) || exit 1\n" if also else ""
    job += "export REJOIN_RDMA=rxe0,rxe1\n"
    for pattern in arguments.filter.split("-")[0].split(":"):  # gtest is content where one names no test
        one_of_it = f"transport_test --gtest_filter={shlex.quote(pattern)}"
        job += f"{one_of_it} --gtest_list_tests | grep -q '^  ' || {{ echo {shlex.quote(f'no test is {pattern}')}; exit 1; }}\n"
    job += f"transport_test --gtest_filter={shlex.quote(arguments.filter)} --gtest_color=no\n"
    return one(job, [BIN / "transport_test", *also], arguments.limit, files=[(BIN.parent / "fake_cuda" / "libcuda.so.1", None)])


if __name__ == "__main__":
    sys.exit(main())
