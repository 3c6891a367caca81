/* A driver of CUDA without a GPU, to be preloaded: torch's autograd asks whether GPU 0 has a context. */
static int number;
void show_gpu(void) { number = 120; }
signed char _ZN3c104cuda12device_countEv(void) { return number; } /* c10::cuda::device_count() */
int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) { return *flags = *active = 0; }
