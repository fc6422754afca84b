// What most sources include, compiled once for all targets that are compiled alike (cmake/headers.cmake). Each source
// still includes what it uses: builds with CMAKE_DISABLE_PRECOMPILE_HEADERS, the preset debug among them, see to it.
#pragma once

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <tl/expected.hpp>
#include <unordered_map>
#include <vector>
