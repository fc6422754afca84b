# What the project needs of the machine: each is looked for, and with what it lacks are named Debian's packages.
# rejoin_find_package(NAME PACKAGES...), rejoin_find_module(PREFIX PACKAGE pkg-config's arguments...),
# rejoin_find_header(HEADER PACKAGE), and at the end rejoin_report_missing().
macro(rejoin_find_package name)
  find_package(${name} QUIET)
  if(NOT ${name}_FOUND)
    list(APPEND REJOIN_MISSING ${ARGN})
  endif()
endmacro()
macro(rejoin_find_module prefix package)
  pkg_check_modules(${prefix} QUIET ${ARGN})
  if(NOT ${prefix}_FOUND)
    list(APPEND REJOIN_MISSING ${package})
  endif()
endmacro()
macro(rejoin_find_header header package)
  string(MAKE_C_IDENTIFIER REJOIN_INCLUDE_${header} include)
  find_path(${include} ${header})
  mark_as_advanced(${include})
  if(NOT ${include})
    list(APPEND REJOIN_MISSING ${package})
  endif()
endmacro()
function(rejoin_report_missing)
  if(REJOIN_MISSING)
    list(JOIN REJOIN_MISSING " " packages)
    message(FATAL_ERROR "This machine lacks what Rejoin is built with. On Debian: apt-get install ${packages}")
  endif()
endfunction()

# Other CPUs have no kernels of their own but those that the compiler makes of the common source.
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  set(REJOIN_X86 ON)
endif()

# How every target of the project is built.
add_library(rejoin_options INTERFACE)
target_include_directories(rejoin_options INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}> $<BUILD_INTERFACE:${PROJECT_BINARY_DIR}>)
# GCC 12 is wrong where it warns of `"text" + string()` (-Wrestrict) and of bytes that insert() puts behind a vector's
# others (-Wstringop-overflow, -Warray-bounds): append() and put() of base/bytes.h say the same without.
# Designated initialisers name what differs from a member's default; GCC would have them name all the others, too.
target_compile_options(rejoin_options INTERFACE
  $<BUILD_INTERFACE:-Wall;-Wextra;-Werror;-Wshadow;-Wnon-virtual-dtor;-Wno-missing-field-initializers>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")  # the sanitizer builds' compiler; the project's is GCC
  target_compile_options(rejoin_options INTERFACE -Wno-unknown-warning-option -Wno-error)
elseif(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # it collects garbage from 128 MB on, which is a tenth of its time
  target_compile_options(rejoin_options INTERFACE
    $<BUILD_INTERFACE:$<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=1000000>>)
endif()
if(REJOIN_SANITIZE)
  target_compile_options(rejoin_options INTERFACE -fsanitize=${REJOIN_SANITIZE} -fno-omit-frame-pointer
    -fno-sanitize-recover=all)
  target_link_options(rejoin_options INTERFACE -fsanitize=${REJOIN_SANITIZE})
  # A third of Clang's time is spared where checks are calls and little is inlined. What its check of vtables would find,
  # which takes a ninth, ASan finds where the memory is no longer the object's.
  if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    target_compile_options(rejoin_options INTERFACE "SHELL:-mllvm -inline-threshold=25")
    if(REJOIN_SANITIZE MATCHES "address")
      target_compile_options(rejoin_options INTERFACE "SHELL:-mllvm -asan-instrumentation-with-call-threshold=0")
    endif()
    if(REJOIN_SANITIZE MATCHES "undefined")  # libraries' templates and inline functions are half of what is compiled
      target_compile_options(rejoin_options INTERFACE -fno-sanitize=vptr
        -fsanitize-ignorelist=${PROJECT_SOURCE_DIR}/tests/ubsan.ignore)
    endif()
  endif()
  find_program(REJOIN_LLD ld.lld HINTS /usr/lib/llvm-14/bin)  # four times as fast as GNU's with these programs' symbols
  if(REJOIN_LLD)
    cmake_path(GET REJOIN_LLD PARENT_PATH lld_folder)
    target_link_options(rejoin_options INTERFACE -fuse-ld=lld -B${lld_folder})
  endif()
  target_compile_definitions(rejoin_options INTERFACE REJOIN_SANITIZED=1)
endif()

# The sanitizers' runtimes guess the size of a loaded library's thread-local memory from what lies before it, and die
# where that memory happens to lie 16 bytes behind the border of a page: they are told not to look.
set(REJOIN_ASAN_ENVIRONMENT ASAN_OPTIONS=detect_leaks=1:intercept_tls_get_addr=0:quarantine_size_mb=32
  LSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/lsan.supp)
set(REJOIN_TSAN_ENVIRONMENT TSAN_OPTIONS=suppressions=${PROJECT_SOURCE_DIR}/tests/tsan.supp:intercept_tls_get_addr=0:atexit_sleep_ms=10)

# rejoin_hide(target): others see of the library that it goes into what public headers declare, which say so by
# '#pragma GCC visibility'.
function(rejoin_hide target)
  set_target_properties(${target} PROPERTIES CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
endfunction()

# rejoin_own_logging(target): a shared library with fmt and spdlog in it, which its version script hides. The linker
# finds them there first, and has no need of the distribution's.
function(rejoin_own_logging target)
  target_sources(${target} PRIVATE $<TARGET_OBJECTS:own_logging>)
  target_link_options(${target} PRIVATE -Wl,--as-needed)
endfunction()

# rejoin_module(NAME SOURCES... LINK targets...): one folder's library, as an object set inside librejoin.
function(rejoin_module name)
  cmake_parse_arguments(ARG "" "" "SOURCES;LINK" ${ARGN})
  add_library(${name} STATIC ${ARG_SOURCES})
  rejoin_hide(${name})
  target_link_libraries(${name} PUBLIC rejoin_options ${ARG_LINK})
endfunction()

# rejoin_compile_quickly(targets...): what takes longer to compile than to run is not optimized in the sanitizer builds.
function(rejoin_compile_quickly)
  if(REJOIN_SANITIZE)
    foreach(target ${ARGN})
      target_compile_options(${target} PRIVATE -O0)
    endforeach()
  endif()
endfunction()

# rejoin_compile_soon(targets...): what reads flags and prints is optimized little, everywhere.
function(rejoin_compile_soon)
  rejoin_compile_quickly(${ARGN})
  if(NOT REJOIN_SANITIZE)
    foreach(target ${ARGN})
      target_compile_options(${target} PRIVATE -O1)
    endforeach()
  endif()
endfunction()

# What the sanitizer builds run, and so all that they build. In the other builds what of it is not PLAIN is no part of `all`,
# and `./run test` runs it under the sanitizers only.
add_custom_target(sanitized)

# rejoin_test(NAME SOURCES... LINK targets... [SANITIZED [THREADED FILTER] [COMPUTES] [PLAIN]] [SERIAL]): a GoogleTest
# program. SANITIZED ones also run in the sanitizer builds, under TSan only those of their tests that the filter takes, since
# others have one thread (none: the program is not built there); PLAIN ones both there and in `./run test`'s release build.
# Of those that COMPUTES the tests' own code is optimized everywhere: it takes longer to run than to compile. SERIAL
# ones have the machine for themselves. FAKE_CUDA ones have the CUDA driver made of software (device/tests/).
function(rejoin_test name)
  if(NOT REJOIN_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "SANITIZED;COMPUTES;PLAIN;SERIAL;FAKE_CUDA" "TIMEOUT;THREADED" "SOURCES;LINK;DEPENDS" ${ARGN})
  if((REJOIN_SANITIZE AND NOT ARG_SANITIZED) OR (REJOIN_SANITIZE STREQUAL "thread" AND ARG_THREADED STREQUAL "none"))
    return()
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  # GoogleTest's macros hold an if of their own: `if (x) EXPECT_EQ(a, b);` is meant so.
  target_compile_options(${name} PRIVATE -Wno-dangling-else)
  # Of what is tested every file is as it ships; the tests compile sooner.
  target_compile_options(${name} PRIVATE $<IF:$<BOOL:${ARG_COMPUTES}>,-O1,-O0>)
  if(REJOIN_SANITIZE)
    target_compile_options(${name} PRIVATE -g0)  # a failed expectation names its line itself
  endif()
  if(REJOIN_SANITIZE STREQUAL "thread" AND CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
    # It adds two calls to each that is not inlined, unless it is told not to; its reports lack the tests' own callers then.
    target_compile_options(${name} PRIVATE "SHELL:-mllvm -tsan-instrument-func-entry-exit=0")
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_LINK} GTest::gtest GTest::gmock GTest::gtest_main)
  if(ARG_FAKE_CUDA)
    add_dependencies(${name} fake_cuda)
    target_compile_definitions(${name} PRIVATE REJOIN_FAKE_CUDA="$<TARGET_SONAME_FILE:fake_cuda>")
  endif()
  set(labels unit)
  if(ARG_SANITIZED)
    add_dependencies(sanitized ${name})
    if(REJOIN_SANITIZE OR CMAKE_CROSSCOMPILING OR NOT ARG_PLAIN)
      set(labels sanitized)
      set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL TRUE)
    endif()
  endif()
  # UCX patches the code of mmap and friends while it runs, which TSan's own interception does not survive.
  set(environment "")
  set(filter *)
  if(CMAKE_CROSSCOMPILING)
    set(filter ${REJOIN_EMULATED_TESTS})
    target_compile_definitions(${name} PRIVATE REJOIN_EMULATED=1)
  elseif(REJOIN_SANITIZE STREQUAL "thread")
    if(ARG_THREADED)
      set(filter ${ARG_THREADED})
    endif()
    set(environment "UCX_MEM_EVENTS=n;UCX_MEM_MMAP_HOOK_MODE=none;")
  endif()
  string(APPEND environment
    "REJOIN_BIN=${CMAKE_BINARY_DIR}/bin;REJOIN_FLIGHT_DIR=${CMAKE_BINARY_DIR}/flight;${REJOIN_TSAN_ENVIRONMENT};${REJOIN_ASAN_ENVIRONMENT}")
  if(REJOIN_SANITIZE OR CMAKE_CROSSCOMPILING)
    set(suites ${CMAKE_CURRENT_BINARY_DIR}/${name}_suites.cmake)
    set(script "set(emulator [==[${CMAKE_CROSSCOMPILING_EMULATOR}]==])\n")
    foreach(variable name filter labels environment)
      string(APPEND script "set(${variable} [==[${${variable}}]==])\n")
    endforeach()
    file(GENERATE OUTPUT ${suites} CONTENT "${script}set(serial $<BOOL:${ARG_SERIAL}>)
set(program [==[$<TARGET_FILE:${name}>]==])
set(directory [==[${CMAKE_CURRENT_BINARY_DIR}]==])
include(${PROJECT_SOURCE_DIR}/cmake/suites.cmake)\n")
    set_property(DIRECTORY APPEND PROPERTY TEST_INCLUDE_FILES ${suites})
  else()
    gtest_discover_tests(${name} DISCOVERY_TIMEOUT 60
      PROPERTIES LABELS ${labels} TIMEOUT ${ARG_TIMEOUT} RUN_SERIAL $<BOOL:${ARG_SERIAL}> ENVIRONMENT "${environment}")
  endif()
endfunction()

# rejoin_proto(NAME FILE [IMPORT DIRECTORY] [LINK targets...]): a library of one file's messages.
function(rejoin_proto name file)
  cmake_parse_arguments(ARG "" "IMPORT" "LINK" ${ARGN})
  set(Protobuf_IMPORT_DIRS ${ARG_IMPORT})
  protobuf_generate_cpp(sources headers ${file})
  add_library(${name} STATIC ${sources})
  rejoin_hide(${name})
  target_include_directories(${name} SYSTEM PUBLIC ${CMAKE_CURRENT_BINARY_DIR})
  target_link_libraries(${name} PUBLIC protobuf::libprotobuf-lite Threads::Threads ${ARG_LINK})
  if(REJOIN_SANITIZE)
    target_compile_options(${name} PRIVATE -fsanitize=${REJOIN_SANITIZE})
  endif()
  rejoin_compile_quickly(${name})
endfunction()
