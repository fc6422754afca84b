// Loads UCX's libraries when the process first makes an engine, so that programs run where they are not installed.
#pragma once

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include "base/result.h"

// The functions of libucp that the backend calls, without the "ucp_" of their names.
// clang-format off
#define REJOIN_UCP(F) \
  F(config_read) F(config_modify) F(config_release) F(init_version) F(cleanup) F(worker_create) \
  F(worker_destroy) F(worker_get_efd) F(worker_get_address) F(worker_release_address) \
  F(worker_set_am_recv_handler) F(worker_arm) F(worker_progress) F(am_send_nbx) F(am_recv_data_nbx) \
  F(ep_create) F(ep_close_nbx) F(request_check_status) F(request_free)
// clang-format on

namespace rejoin::transport::ucx {

struct Ucx {
#define REJOIN_UCP_MEMBER(name) decltype(&::ucp_##name) name = nullptr;
  REJOIN_UCP(REJOIN_UCP_MEMBER)
#undef REJOIN_UCP_MEMBER
  // These two are of libucs.
  decltype(&::ucs_status_string) status_string = nullptr;
  decltype(&::ucs_global_opts_set_value) set_global_option = nullptr;

  // Does what ucp_init() does, which UCX's header has inline.
  ucs_status_t init(const ucp_params_t* params, const ucp_config_t* config, ucp_context_h* context) const {
    return init_version(UCP_API_MAJOR, UCP_API_MINOR, params, config, context);
  }
};

// Loads the libraries, or returns what an earlier call has loaded. Thread: any. Errors: `unavailable` where they can't
// be loaded, with what to install.
Result<const Ucx*> load_ucx();
// Returns what was loaded. Who has an engine may call it.
const Ucx& ucx();

}  // namespace rejoin::transport::ucx
