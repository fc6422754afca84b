// Makes the store that the settings name. It stands apart from them because only who has several coordinators needs
// what speaks with etcd.
#pragma once

#include <functional>
#include <memory>
#include <string>

#include "base/clock.h"
#include "base/result.h"
#include "daemon/store_settings.h"
#include "membership/store.h"

namespace asio {
class io_context;
}

namespace rejoin::daemon {

// Of settings that are checked and shared(). `silence`: of which the deadline of a try is made. `stuck`: as EtcdOptions
// has it. Errors: files that can't be read, or that others may read; `exhausted`: no threads.
Result<std::unique_ptr<membership::Store>> open_store(asio::io_context& io, const StoreSettings& s, Duration silence,
                                                      std::function<void(const std::string&)> stuck = {});

// Whether its files, if it is shared(), can be read and are what they should be. Errors name the flag.
Result<> check_files(const StoreSettings& s);

struct EtcdOptions;
Result<EtcdOptions> etcd_options(const StoreSettings& s, Duration silence);  // likewise

}  // namespace rejoin::daemon
