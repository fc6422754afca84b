/* minimal.cc in C: the same job, by rejoin/c.h. Replicas of both train together, and have the same bits. */
#include <inttypes.h>
#include <rejoin/c.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static rejoin_session* volatile running;
static volatile sig_atomic_t came; /* SIGTERM, SIGINT */

static void on_signal(int number) {
  came = number;
  if (running != NULL) rejoin_interrupt(running);
}

static float gradient_of(const rejoin_step* step, float weight) {
  float sum = 0, count = 0;
  for (size_t i = 0; i < step->batch_count; ++i)
    for (uint64_t sample = step->batch[i].begin; sample < step->batch[i].end; ++sample, ++count) {
      const float x = (float)(sample % 7) - 3;
      sum += 2 * (weight * x - 3 * x) * x;
    }
  return sum / count;
}

static rejoin_code update(rejoin_session* session, float* weight, float* velocity) {
  const rejoin_update* updates = NULL;
  size_t count = 0;
  int committed = 0;
  const rejoin_code decided = rejoin_begin_update(session, &committed, &updates, &count);
  if (decided != REJOIN_OK || !committed) return decided; /* not committed: the same step comes once more */
  for (const rejoin_update* one = updates; one < updates + count; ++one)
    for (uint64_t i = 0; i < one->count; ++i) {
      float* v = &velocity[one->first + i];
      *v = 0.9f * *v + ((const float*)one->gradient.data)[i];
      weight[one->first + i] -= 0.01f * *v;
    }
  return rejoin_end_update(session);
}

static rejoin_code train(rejoin_session* session) {
  const rejoin_tensor_spec spec = {.name = "w", .type = REJOIN_FLOAT32, .count = 1, .moments = 1, .elementwise = 1};
  uint32_t w = 0, bucket = 0;
  rejoin_memory weight, velocity, gradient;
  rejoin_code code = rejoin_add(session, &spec, NULL, &w);
  if (code == REJOIN_OK) code = rejoin_bucket(session, &w, 1, NULL, &bucket);
  if (code == REJOIN_OK) code = rejoin_allocate(session);
  if (code == REJOIN_OK) code = rejoin_weight(session, w, &weight);
  if (code == REJOIN_OK) code = rejoin_moment(session, w, 0, &velocity);
  if (code == REJOIN_OK) code = rejoin_gradient(session, w, &gradient);
  rejoin_use_weights(session);
  if (code == REJOIN_OK) code = rejoin_join(session, NULL, 1);
  while (code == REJOIN_OK) {
    rejoin_step step;
    code = rejoin_begin_step(session, &step);
    if (code != REJOIN_OK || step.number == 0) break; /* 0: the job is finished */
    if (step.contributes) {
      *(float*)gradient.data = gradient_of(&step, *(const float*)weight.data) * (float)step.weight;
      code = rejoin_all_reduce(session, bucket);
    }
    if (code == REJOIN_OK) code = update(session, weight.data, velocity.data);
  }
  int known = 0;
  uint64_t version = 0, digest = 0;
  if (code == REJOIN_OK) code = rejoin_state_version(session, &known, &version);
  if (code != REJOIN_OK || !known) return code; /* not known: it was still catching up */
  code = rejoin_state_digest(session, &digest);
  if (code == REJOIN_OK)
    printf("w = %.4f after step %" PRIu64 ", digest %016" PRIx64 "\n", *(const float*)weight.data, version, digest);
  return code;
}

int main(int argc, char** argv) {
  (void)argv;
  if (argc > 1) return fprintf(stderr, "no arguments are taken: settings come from REJOIN_* variables\n"), 2;
  const char* device = getenv("REJOIN_DEVICE");
  if (device != NULL && *device != '\0' && strcmp(device, "host") != 0)
    return fprintf(stderr, "this program computes on the CPU: REJOIN_DEVICE=host\n"), 2;
  rejoin_session* session = NULL;
  if (rejoin_open(NULL, 0, &session) != REJOIN_OK) return fprintf(stderr, "%s\n", rejoin_error()), 2;
  running = session;
  signal(SIGTERM, on_signal);
  signal(SIGINT, on_signal);

  const rejoin_code trained = train(session);
  if (trained != REJOIN_OK && came == 0) fprintf(stderr, "%s\n", rejoin_error());
  const rejoin_code left = rejoin_leave(session); /* however it ended, nobody waits for this replica */
  if (left != REJOIN_OK && (trained == REJOIN_OK || came != 0)) fprintf(stderr, "%s\n", rejoin_error());
  running = NULL;
  rejoin_close(session);
  if (came != 0 && left == REJOIN_OK) fprintf(stderr, "interrupted; this replica has left\n");
  if (came != 0) return 128 + came;
  if (trained == REJOIN_CANCELLED) return 3;        /* to be started again, to catch up */
  if (trained == REJOIN_INVALID_ARGUMENT) return 2; /* which would not help */
  return trained == REJOIN_OK && left == REJOIN_OK ? 0 : 1;
}
