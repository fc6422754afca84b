// What a test does to the devices of fake_verbs.cc.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <vector>

// `port`: the devices have one, but those who have one open hear of others, too.
void fake_verbs_port(const char* device, bool up, int port = 1);
// Its completion queues are in error: whoever has one is told, and nothing completes there any more.
void fake_verbs_break_queues(const char* device);
// The RoCE v2 GIDs of its port, from index 1 on. None: the one that it has from the start.
using FakeVerbsGid = std::array<unsigned char, 16>;
void fake_verbs_gids(const char* device, std::vector<FakeVerbsGid> gids);
// Called for every RDMA write or read that the devices carry out: where its bytes are here and there.
using FakeVerbsTransfer =
    std::function<void(const char* device, const void* here, const void* there, std::uint64_t bytes)>;
void fake_verbs_watch(FakeVerbsTransfer watcher);
// From now on the device fails every transfer of which this memory (by its address in the program) is the local or the
// remote end. Null: it reaches everything again.
void fake_verbs_blind(const char* device, const void* memory, std::uint64_t bytes);
// The device places data out of order, on queue pairs that ask for it (mlx5dv; both devices do from the start), or not.
// Those do their work, and parts of it, in any order, and complete it in that order.
void fake_verbs_out_of_order(const char* device, bool can);
// Unplugged: everything of it fails from now on, and whoever has it open is told. Plugged in: it can be opened again.
void fake_verbs_plug(const char* device, bool in);
