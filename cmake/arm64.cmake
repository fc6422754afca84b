# The toolchain of './run arm64': Debian's cross compiler, its libraries for arm64 in build/arm64-sysroot, and QEMU, which
# runs what is built.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_SYSROOT ${CMAKE_CURRENT_LIST_DIR}/../build/arm64-sysroot)
file(REAL_PATH ${CMAKE_SYSROOT} CMAKE_SYSROOT)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L ${CMAKE_SYSROOT})
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_EXE_LINKER_FLAGS_INIT -Wl,-rpath-link,${CMAKE_SYSROOT}/usr/lib/aarch64-linux-gnu:${CMAKE_SYSROOT}/lib/aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_LIBDIR} ${CMAKE_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig:${CMAKE_SYSROOT}/usr/share/pkgconfig)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${CMAKE_SYSROOT})
# What QEMU does not emulate: reading other processes' memory (shared memory), what the kernel knows of a connection
# (TCP_INFO), limits of locked memory, populating pages; and where a program starts itself again, which is another
# machine's.
string(JOIN : REJOIN_EMULATED_TESTS *-*shm* Shm* *DeviceGroupsOver*/1 *AChildIsToldThatItIsItsParents* *RoundTripIsTold* TcpTraffic.*
  Pages.ThatAProcessMayNotLock* Pages.ThatWouldBeABusError* *AMisspeltVariableIsNamedOnce *AnyOtherThreadsCallOfTheDriver* EtcdThreads.*)
