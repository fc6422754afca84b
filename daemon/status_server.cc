#include "daemon/status_server.h"

#include <microhttpd.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>

#include "base/fail.h"
#include "base/fd.h"
#include "base/log.h"
#include "daemon/listen.h"

namespace rejoin::daemon {

// Whoever is connected. The library bounds only the time in which nothing comes, so that a byte now and then would keep
// a connection; and it does not hear of an end that came before it has read what came with it.
struct StatusServer::Caller {
  Caller(asio::io_context& io, int socket, Duration patience) : fd(socket), deadline(io) {
    deadline.expires_after(patience);
    // What has expired already can't be cancelled, and by then the number may be another socket's.
    deadline.async_wait([this, lives = std::weak_ptr(alive)](asio::error_code cancelled) {
      if (!cancelled && !lives.expired()) end();
    });
  }
  void end() const { ::shutdown(fd, SHUT_RDWR); }  // the library sees it, and closes it
  const int fd;
  bool asked = false;
  asio::steady_timer deadline;
  std::shared_ptr<bool> alive = std::make_shared<bool>(true);
};

namespace {

void log_http(void*, const char* format, va_list arguments) {
  std::array<char, 512> line{};
  std::vsnprintf(line.data(), line.size(), format, arguments);
  std::string text(line.data());
  while (text.ends_with('\n')) text.pop_back();
  spdlog::debug("status: {}", text);
}

using Body = std::shared_ptr<const std::string>;

}  // namespace

Result<std::unique_ptr<StatusServer>> StatusServer::start(asio::io_context& io, const std::string& listen,
                                                          Source source, Duration patience) {
  std::unique_ptr<StatusServer> server(new StatusServer(io, std::move(source), patience));
  auto address = listen_on(server->acceptor_, listen);
  if (!address)
    return fail(address.error().code, "status on {}: {}; choose another --status (REJOIN_STATUS) address or port 0",
                listen, address.error().message);
  server->address_ = *address;
  if (auto started = server->start_http(); !started) return tl::unexpected(started.error());
  server->accept();
  server->watch();
  server->watch_for_ends();
  return server;
}

Result<> StatusServer::start_http() {
  Fd ends(::epoll_create1(EPOLL_CLOEXEC));
  if (!ends) return fail_errno("epoll_create1");
  hung_up_.assign(ends.release());
  const auto hook = +[](void* self, MHD_Connection* connection, void** caller, MHD_ConnectionNotificationCode what) {
    auto& server = *static_cast<StatusServer*>(self);
    if (what == MHD_CONNECTION_NOTIFY_STARTED) {
      const auto* info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_CONNECTION_FD);
      auto* came = new Caller(server.io_, info->connect_fd, server.patience_);
      *caller = came;
      server.callers_.push_back(came);
      // Not to be watched costs its time alone. The descriptor leaves the epoll when the library closes it, at once
      // after it has said so.
      epoll_event event{.events = EPOLLRDHUP | EPOLLONESHOT, .data = {.ptr = came}};
      (void)::epoll_ctl(server.hung_up_.native_handle(), EPOLL_CTL_ADD, came->fd, &event);
      return;
    }
    server.halves_.erase(static_cast<Caller*>(*caller));
    std::erase(server.callers_, static_cast<Caller*>(*caller));
    delete static_cast<Caller*>(*caller);
    if (std::exchange(server.full_, false)) server.accept();
  };
  const auto asked = +[](void* self, MHD_Connection* connection, const char* path, const char* method, const char*,
                         const char*, std::size_t*, void**) {
    return static_cast<StatusServer*>(self)->answer(connection, path, method) ? MHD_YES : MHD_NO;
  };
  // Sockets are accepted here, where a lack of descriptors and too many callers are known how to deal with.
  http_ = MHD_start_daemon(MHD_USE_EPOLL | MHD_USE_NO_LISTEN_SOCKET | MHD_USE_ERROR_LOG, 0, nullptr, nullptr, asked,
                           this, MHD_OPTION_EXTERNAL_LOGGER, &log_http, nullptr, MHD_OPTION_CONNECTION_LIMIT,
                           static_cast<unsigned>(kMostRequests), MHD_OPTION_CONNECTION_MEMORY_LIMIT, kMostMemory,
                           MHD_OPTION_NOTIFY_CONNECTION, hook, this, MHD_OPTION_END);
  if (http_ == nullptr) return fail(ErrorCode::unavailable, "status: the HTTP server could not be started");
  const auto* info = MHD_get_daemon_info(http_, MHD_DAEMON_INFO_EPOLL_FD);
  auto watched = duplicate(info->epoll_fd);
  if (!watched) return tl::unexpected(watched.error());
  ready_.assign(watched->release());
  return {};
}

StatusServer::~StatusServer() {
  if (http_ != nullptr) MHD_stop_daemon(http_);
}

void StatusServer::accept() {
  acceptor_.async_accept([this](asio::error_code error, asio::ip::tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    if (without_descriptors(error)) {
      again_.expires_after(kWithoutDescriptors);
      return again_.async_wait([this](asio::error_code cancelled) {
        if (!cancelled) accept();
      });
    }
    if (!error) take(std::move(socket));
    full_ = callers_.size() >= kMostRequests;
    if (full_) return make_room();
    accept();
  });
}

// An honest caller asks at once. When the library has closed the connection, the next one is accepted.
void StatusServer::make_room() {
  const auto silent = std::ranges::find_if(callers_, [](const Caller* caller) { return !caller->asked; });
  if (silent != callers_.end()) (*silent)->end();
  else if (!callers_.empty()) callers_.front()->end();
}

// The library has the socket from here on, and closes it, also where it finds no place for it.
void StatusServer::take(asio::ip::tcp::socket socket) {
  asio::error_code error;
  const auto from = socket.remote_endpoint(error);
  const int fd = error ? -1 : socket.release(error);
  if (error) return;
  (void)MHD_add_connection(http_, fd, from.data(), static_cast<socklen_t>(from.size()));
  work();
}

void StatusServer::work() {
  MHD_run(http_);
  drop_halves();
  MHD_UNSIGNED_LONG_LONG milliseconds = 0;
  due_.cancel();
  if (MHD_get_timeout(http_, &milliseconds) == MHD_NO) return;
  due_.expires_after(std::chrono::milliseconds(milliseconds));
  due_.async_wait([this](asio::error_code cancelled) {
    if (!cancelled) work();
  });
}

void StatusServer::watch() {
  ready_.async_wait(asio::posix::stream_descriptor::wait_read, [this](asio::error_code error) {
    if (error) return;
    work();
    watch();
  });
}

void StatusServer::watch_for_ends() {
  hung_up_.async_wait(asio::posix::stream_descriptor::wait_read, [this](asio::error_code error) {
    if (error) return;
    std::array<epoll_event, kMostRequests> ended;
    const int count = ::epoll_wait(hung_up_.native_handle(), ended.data(), static_cast<int>(ended.size()), 0);
    for (int i = 0; i < count; ++i) halves_.insert(static_cast<Caller*>(ended[static_cast<std::size_t>(i)].data.ptr));
    work();
    watch_for_ends();
  });
}

// Who says no more, has been read to the end and has asked nothing waits for nothing.
void StatusServer::drop_halves() {
  std::erase_if(halves_, [](const Caller* caller) {
    int unread = 0;
    if (!caller->asked && ::ioctl(caller->fd, FIONREAD, &unread) == 0 && unread > 0) return false;
    if (!caller->asked) caller->end();
    return true;
  });
}

bool StatusServer::answer(MHD_Connection* connection, const char* path, const char* method) const {
  const auto* info = MHD_get_connection_info(connection, MHD_CONNECTION_INFO_SOCKET_CONTEXT);
  static_cast<Caller*>(info->socket_context)->asked = true;
  Answer answer{.code = MHD_HTTP_METHOD_NOT_ALLOWED, .body = std::make_shared<std::string>("only GET\n")};
  if (std::strcmp(method, MHD_HTTP_METHOD_GET) == 0 || std::strcmp(method, MHD_HTTP_METHOD_HEAD) == 0)
    answer = source_(path);
  auto* body = new Body(std::move(answer.body));  // shared by all who get the same
  // The library does not write to it.
  MHD_Response* response = MHD_create_response_from_buffer_with_free_callback_cls(
      (*body)->size(), const_cast<char*>((*body)->data()), [](void* held) { delete static_cast<Body*>(held); }, body);
  if (response == nullptr) {
    delete body;
    return false;
  }
  for (const auto& [name, value] : {std::pair{MHD_HTTP_HEADER_CONTENT_TYPE, answer.type.c_str()},
                                    {MHD_HTTP_HEADER_CONNECTION, "close"},
                                    {MHD_HTTP_HEADER_CACHE_CONTROL, "no-store"},
                                    {"X-Content-Type-Options", "nosniff"},
                                    {"Content-Security-Policy", answer.policy.c_str()}})
    MHD_add_response_header(response, name, value);
  if (answer.code == MHD_HTTP_METHOD_NOT_ALLOWED) MHD_add_response_header(response, MHD_HTTP_HEADER_ALLOW, "GET, HEAD");
  const MHD_Result queued = MHD_queue_response(connection, answer.code, response);
  MHD_destroy_response(response);
  return queued == MHD_YES;
}

}  // namespace rejoin::daemon
