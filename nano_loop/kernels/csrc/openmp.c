/* The OpenMP runtime that the functions of this folder call. They run on torch's threads if it is torch's, too. */
#include "denormals.h"
#include "threads.h"

extern void omp_set_num_threads(int);
extern int omp_get_max_threads(void);

int max_threads(void) { return omp_get_max_threads(); }
void set_threads(int threads) { omp_set_num_threads(threads); }

/* How many threads a parallel region gets. */
int threads_of_region(int threads) {
    int count = 0;
#pragma omp parallel num_threads(threads)
#pragma omp single
    count = omp_get_num_threads();
    return count;
}

static _Thread_local unsigned state_before; /* 0: as it was */

/* Lets results of these threads that are denormal be 0, in whatever they compute until `restore_threads`. A Ctrl-C may
   come between any two calls, so either may be repeated, or be missing. */
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
