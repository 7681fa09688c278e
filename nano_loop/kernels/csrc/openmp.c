/* Reports which OpenMP runtime the functions in this folder use. They run on torch's threads if it is also torch's. */
#include "denormals.h"
#include "threads.h"

extern void omp_set_num_threads(int);
extern int omp_get_max_threads(void);

int max_threads(void) { return omp_get_max_threads(); }
void set_threads(int threads) { omp_set_num_threads(threads); }

/* The number of threads in a parallel region. */
int threads_of_region(int threads) {
    int count = 0;
#pragma omp parallel num_threads(threads)
#pragma omp single
    count = omp_get_num_threads();
    return count;
}

static _Thread_local unsigned state_before; /* 0: unchanged */

/* Flushes denormal results of these threads to 0 in all computations until `restore_threads`. A KeyboardInterrupt can
   occur between any two calls, so either may be repeated or omitted. */
void flush_threads(int threads) {
#pragma omp parallel num_threads(threads)
    if (!state_before) state_before = flush_denormals(1);
}

void restore_threads(int threads) {
#pragma omp parallel num_threads(threads)
    if (state_before) {
        restore(state_before);
        state_before = 0;
    }
}
