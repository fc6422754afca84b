// gRPC's channels to etcd's members.
#pragma once

#include <grpcpp/channel.h>
#include <grpcpp/security/credentials.h>

#include <chrono>
#include <memory>
#include <string>

#include "base/result.h"
#include "daemon/etcd_client.h"

namespace rejoin::daemon::etcd_client {

// A member that is down is tried again all the time, so that it is found soon when it is back; meanwhile a try fails at
// once. A connection that does not come about is given up after kConnectMs: its packets may have met a cut link, after
// which the system would repeat them ever more seldom.
constexpr int kFirstPauseMs = 50, kMostPauseMs = 100, kConnectMs = 1000;

Result<std::shared_ptr<grpc::ChannelCredentials>> credentials_of(const EtcdOptions& options);
// To the first of the target's addresses that takes it. The member's certificate is to be the endpoint's, HOST:PORT.
std::shared_ptr<grpc::Channel> connect(const std::string& target, const std::string& endpoint,
                                       const std::shared_ptr<grpc::ChannelCredentials>& credentials);
// gRPC's own log is noise, since what it says of a try is in the try's error; but for its last words.
void log_quietly();

}  // namespace rejoin::daemon::etcd_client
