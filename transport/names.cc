#include "transport/names.h"

#include <mutex>

#include "base/fail.h"
#include "base/fd.h"
#include "base/start_thread.h"
#include "transport/epoll.h"

namespace rejoin::transport {

struct Names::Arrivals {
  std::mutex mutex;
  std::vector<std::pair<std::string, Result<Addresses>>> come;
  Fd wakes;
};

Result<> Names::ask(const std::string& name, std::uint64_t asker, const Fd& epoll, std::uint64_t tag, TimePoint now) {
  if (!arrivals_) {
    auto arrivals = std::make_shared<Arrivals>();
    auto wakes = make_eventfd();
    if (!wakes) return tl::unexpected(wakes.error());
    arrivals->wakes = std::move(*wakes);
    if (auto added = add_to(epoll, arrivals->wakes.get(), {.events = EPOLLIN, .data = {.u64 = tag}}); !added)
      return added;
    arrivals_ = std::move(arrivals);
  }
  const auto [question, fresh] = open_.try_emplace(name);
  question->second.askers.emplace_back(asker, now);
  if (fresh) queue_.push_back(name);
  begin_questions();
  return {};
}

void Names::begin_questions() {
  while (under_way_ < kAtOnce && !queue_.empty()) {
    const std::string name = std::move(queue_.front());
    queue_.pop_front();
    std::thread asking;
    const auto started = start_thread(asking, [arrivals = arrivals_, name] {
      auto found = SocketAddress::resolve_all(name);
      const std::lock_guard lock(arrivals->mutex);
      arrivals->come.emplace_back(name, std::move(found));
      signal_eventfd(arrivals->wakes);
    });
    ++under_way_;
    if (started) {
      asking.detach();
      continue;
    }
    const std::lock_guard lock(arrivals_->mutex);
    arrivals_->come.emplace_back(name, tl::unexpected(started.error()));
    signal_eventfd(arrivals_->wakes);
  }
}

std::vector<Names::Answer> Names::take(TimePoint now, Duration patience) {
  std::vector<Answer> answers;
  if (!arrivals_) return answers;
  decltype(arrivals_->come) come;
  {
    const std::lock_guard lock(arrivals_->mutex);
    if (!arrivals_->come.empty()) drain_eventfd(arrivals_->wakes);
    come.swap(arrivals_->come);
  }
  for (const auto& [name, found] : come) end(name, found, answers);
  for (auto& [name, question] : open_) {
    const auto known = known_.find(name);
    if (known == known_.end()) continue;
    std::erase_if(question.askers, [&, &known = known->second](const auto& one) {
      if (now - one.second < patience) return false;
      answers.push_back({one.first, known});
      return true;
    });
  }
  begin_questions();
  return answers;
}

// A name server that says that there is no such name is believed.
void Names::end(const std::string& name, const Result<Addresses>& found, std::vector<Answer>& answers) {
  --under_way_;
  const auto question = open_.extract(name);
  if (found) {
    if (known_.size() >= kKnown) known_.clear();
    known_[name] = *found;
  }
  const auto known = known_.find(name);
  const bool as_before = !found && found.error().code != ErrorCode::invalid_argument && known != known_.end();
  for (const auto& [asker, since] : question.mapped().askers)
    answers.push_back({asker, as_before ? Result<Addresses>(known->second) : found});
}

void Names::forget(std::uint64_t asker) {
  for (auto& [name, question] : open_)
    std::erase_if(question.askers, [&](const auto& one) { return one.first == asker; });
}

}  // namespace rejoin::transport
