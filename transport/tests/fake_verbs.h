// What a test does to the devices of fake_verbs.cc.
#pragma once

#include <cstdint>
#include <functional>

void fake_verbs_port(const char* device, bool up);
// Called for every RDMA write or read that the devices carry out: where its bytes are here and there.
using FakeVerbsTransfer = std::function<void(const void* here, const void* there, std::uint64_t bytes)>;
void fake_verbs_watch(FakeVerbsTransfer watcher);
// Unplugged: everything of it fails from now on, and whoever has it open is told. Plugged in: it can be opened again.
void fake_verbs_plug(const char* device, bool in);
