// Reads what the kernel tells in /sys: small files of one line, PCI devices, and NUMA nodes with their CPUs.
#pragma once

#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace rejoin::sys_files {

std::string line_in(const std::filesystem::path& file);  // the first one; empty: there is none
// What a line begins with: of "16.0 GT/s PCIe" 16, of "Unknown" nothing.
double number_in(const std::filesystem::path& file);
std::vector<std::filesystem::path> sorted_entries(const std::filesystem::path& directory);

// Returns the numbers of a list such as "0-3,8-11". It passes over what is no number, and leaves out what is above
// `most`.
std::vector<std::size_t> numbers_in(std::string_view list, std::size_t most);

// `device` is a device's directory or a link to it. Returns nothing where the kernel does not know its node, or there
// is one node only.
std::optional<int> numa_node(const std::filesystem::path& device);
// These read `sys`/devices/system/node: how many nodes have CPUs, and which CPUs one of them has.
std::size_t numa_nodes(const std::filesystem::path& sys);
std::string cpus_of(const std::filesystem::path& sys, int numa_node);

}  // namespace rejoin::sys_files
