// What the kernel tells in /sys: small files of one line, PCI devices, and NUMA nodes with their CPUs.
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

// "0-3,8-11"; what is no number is passed over, and what is above `most` is left out.
std::vector<std::size_t> numbers_in(std::string_view list, std::size_t most);

// Of a device's directory, or a link to it; nothing: the kernel does not know it, or there is one node only.
std::optional<int> numa_node(const std::filesystem::path& device);
// Whose CPUs are in `sys`/devices/system/node: how many nodes have some, and which those of one are.
std::size_t numa_nodes(const std::filesystem::path& sys);
std::string cpus_of(const std::filesystem::path& sys, int numa_node);

}  // namespace rejoin::sys_files
