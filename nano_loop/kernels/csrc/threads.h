/* torch's threads, which run OpenMP directives. */
#pragma once
#ifndef _OPENMP
#error "the compiler ignores the directives of OpenMP: kernels would compute in one thread"
#endif

extern int omp_get_thread_num(void);
extern int omp_get_num_threads(void);
