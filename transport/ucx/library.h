// UCX's libraries, loaded when an engine is first made.
#pragma once

#include <ucp/api/ucp.h>
#include <ucs/config/global_opts.h>

#include "base/result.h"

// Functions of libucp that the backend calls, by their names without "ucp_".
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
  // Of libucs.
  decltype(&::ucs_status_string) status_string = nullptr;
  decltype(&::ucs_global_opts_set_value) set_global_option = nullptr;

  // As the header has it inline.
  ucs_status_t init(const ucp_params_t* params, const ucp_config_t* config, ucp_context_h* context) const {
    return init_version(UCP_API_MAJOR, UCP_API_MINOR, params, config, context);
  }
};

// Errors: `unavailable` where they can't be loaded, with what to install.
Result<const Ucx*> load_ucx();
const Ucx& ucx();  // that has been loaded: whoever has an engine has done so

}  // namespace rejoin::transport::ucx
