//! A thin safe layer over the driver API: context, stream, memory, modules, launches, graphs.
//!
//! Everything here is owned and freed on drop. The primary context is made current on the calling thread by
//! [`Context::bind`], once per entry into the executor. All device work goes to one stream.
#![allow(unsafe_code, reason = "foreign functions of the driver, called through cudarc's bindings")]

use std::ffi::{CStr, CString, c_void};
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::sys::{self, CUdevice_attribute as Attribute, CUresult};

use crate::CudaError;
use crate::kernels::KernelArgs;

/// Turns a driver result into our error, with the driver's own words.
fn check(call: &'static str, result: CUresult) -> Result<(), CudaError> {
    if result == CUresult::CUDA_SUCCESS {
        return Ok(());
    }
    let mut text = std::ptr::null();
    // SAFETY: the pointer is valid for the call; the driver returns a static string or leaves it null.
    let known =
        unsafe { sys::cuGetErrorString(result, &raw mut text) } == CUresult::CUDA_SUCCESS && !text.is_null();
    let what = if known {
        // SAFETY: a static, zero-terminated string of the driver.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    } else {
        format!("{result:?}")
    };
    Err(failure(call, result, what))
}

/// After some errors every later call fails, too: the context is gone, and only a new process gets another.
fn failure(call: &'static str, result: CUresult, what: String) -> CudaError {
    match result {
        CUresult::CUDA_ERROR_ECC_UNCORRECTABLE
        | CUresult::CUDA_ERROR_NVLINK_UNCORRECTABLE
        | CUresult::CUDA_ERROR_DEVICE_UNAVAILABLE
        | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED
        | CUresult::CUDA_ERROR_ILLEGAL_ADDRESS
        | CUresult::CUDA_ERROR_LAUNCH_TIMEOUT
        | CUresult::CUDA_ERROR_ASSERT
        | CUresult::CUDA_ERROR_HARDWARE_STACK_ERROR
        | CUresult::CUDA_ERROR_ILLEGAL_INSTRUCTION
        | CUresult::CUDA_ERROR_MISALIGNED_ADDRESS
        | CUresult::CUDA_ERROR_INVALID_ADDRESS_SPACE
        | CUresult::CUDA_ERROR_INVALID_PC
        | CUresult::CUDA_ERROR_LAUNCH_FAILED => CudaError::Lost { call, what },
        _ => CudaError::Call { call, what },
    }
}

/// Whether the driver's library can be opened.
pub(crate) fn is_present() -> bool {
    // SAFETY: only tries to open libraries by name.
    unsafe { sys::is_culib_present() }
}

/// A device with its primary context.
pub(crate) struct Context {
    device: sys::CUdevice,
    context: sys::CUcontext,
    pub(crate) name: String,
    pub(crate) arch: u32,
    pub(crate) multiprocessors: u32,
    /// Most shared memory of a CTA, in bytes.
    pub(crate) shared_bytes: u32,
}

// SAFETY: a primary context may be made current on any thread; every entry binds it first.
unsafe impl Send for Context {}
// SAFETY: the fields never change after construction.
unsafe impl Sync for Context {}

impl Context {
    /// Opens device `index`.
    pub(crate) fn open(index: usize) -> Result<Arc<Self>, CudaError> {
        if !is_present() {
            return Err(CudaError::LibraryMissing {
                library: "libcuda (NVIDIA driver)",
                hint: "install the NVIDIA driver, or use the CPU backend".to_owned(),
            });
        }
        // SAFETY: the library is present.
        check("cuInit", unsafe { sys::cuInit(0) })?;
        let mut count = 0;
        // SAFETY: valid out pointer.
        check("cuDeviceGetCount", unsafe { sys::cuDeviceGetCount(&raw mut count) })?;
        if index >= count as usize {
            return Err(CudaError::NoDevice { wanted: index, found: count as usize });
        }
        let mut device = 0;
        // SAFETY: the index is below the count.
        check("cuDeviceGet", unsafe { sys::cuDeviceGet(&raw mut device, index as i32) })?;
        let mut name = [0u8; 128];
        // SAFETY: the buffer has the length that is passed; the driver ends the string with a zero.
        check("cuDeviceGetName", unsafe { sys::cuDeviceGetName(name.as_mut_ptr().cast(), 128, device) })?;
        let name =
            CStr::from_bytes_until_nul(&name).map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let attribute = |which| -> Result<u32, CudaError> {
            let mut value = 0;
            // SAFETY: valid out pointer, device from above.
            check("cuDeviceGetAttribute", unsafe {
                sys::cuDeviceGetAttribute(&raw mut value, which, device)
            })?;
            Ok(value as u32)
        };
        let arch = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)? * 10
            + attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let multiprocessors = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let shared_bytes = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)?;
        let mut context = std::ptr::null_mut();
        // SAFETY: valid out pointer, device from above; released in drop.
        check("cuDevicePrimaryCtxRetain", unsafe {
            sys::cuDevicePrimaryCtxRetain(&raw mut context, device)
        })?;
        let this = Self { device, context, name, arch, multiprocessors, shared_bytes };
        this.bind()?;
        Ok(Arc::new(this))
    }

    /// Makes the context current on this thread.
    pub(crate) fn bind(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as self.
        check("cuCtxSetCurrent", unsafe { sys::cuCtxSetCurrent(self.context) })
    }

    /// Free and total device memory in bytes.
    pub(crate) fn memory(&self) -> Result<(u64, u64), CudaError> {
        self.bind()?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: valid out pointers, context bound.
        check("cuMemGetInfo", unsafe { sys::cuMemGetInfo_v2(&raw mut free, &raw mut total) })?;
        Ok((free as u64, total as u64))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`.
        unsafe { sys::cuDevicePrimaryCtxRelease_v2(self.device) };
    }
}

/// The driver's version, such as 13000.
pub(crate) fn driver_version() -> Result<i32, CudaError> {
    let mut version = 0;
    // SAFETY: valid out pointer; callers have opened a context, so the library is there.
    check("cuDriverGetVersion", unsafe { sys::cuDriverGetVersion(&raw mut version) })?;
    Ok(version)
}

/// Waits until what was set or copied on the default stream is in place. These calls return before that (a copy once the
/// values are in the driver's own memory), and our streams do not wait for the default stream.
fn settle() -> Result<(), CudaError> {
    // SAFETY: null names the default stream of the context that the caller has bound.
    check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(std::ptr::null_mut()) })
}

/// Numbers of which every bit pattern is a value: what may be read back as bytes that a device has written.
///
/// # Safety
/// No padding, no invalid bit pattern; all zeros is a value.
pub(crate) unsafe trait Plain: Copy {}

// SAFETY: plain numbers.
unsafe impl Plain for u8 {}
// SAFETY: plain numbers.
unsafe impl Plain for u16 {}
// SAFETY: plain numbers.
unsafe impl Plain for u32 {}
// SAFETY: plain numbers.
unsafe impl Plain for u64 {}
// SAFETY: plain numbers.
unsafe impl Plain for f32 {}

/// Bytes of `len` values, at least what an allocation needs.
fn bytes_of<T>(len: usize) -> Result<usize, CudaError> {
    let bytes = len.checked_mul(size_of::<T>()).filter(|bytes| isize::try_from(*bytes).is_ok());
    bytes
        .map(|bytes| bytes.max(16))
        .ok_or_else(|| CudaError::Unsupported(format!("a buffer of {len} values")))
}

/// Device memory of `len` values of `T`, not initialised unless made by [`Buffer::zeroed`].
pub(crate) struct Buffer<T> {
    context: Arc<Context>,
    pointer: sys::CUdeviceptr,
    len: usize,
    values: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    pub(crate) fn new(context: &Arc<Context>, len: usize, what: &str) -> Result<Self, CudaError> {
        context.bind()?;
        let bytes = bytes_of::<T>(len)?;
        let mut pointer = 0;
        // SAFETY: valid out pointer, context bound; freed in drop.
        let result = unsafe { sys::cuMemAlloc_v2(&raw mut pointer, bytes) };
        if result == CUresult::CUDA_ERROR_OUT_OF_MEMORY {
            let available = context.memory()?.0;
            return Err(CudaError::OutOfMemory { what: what.to_owned(), needed: bytes as u64, available });
        }
        check("cuMemAlloc", result)?;
        Ok(Self { context: context.clone(), pointer, len, values: PhantomData })
    }

    pub(crate) fn zeroed(context: &Arc<Context>, len: usize, what: &str) -> Result<Self, CudaError> {
        let buffer = Self::new(context, len, what)?;
        // SAFETY: the allocation has at least this many bytes.
        check("cuMemsetD8", unsafe { sys::cuMemsetD8_v2(buffer.pointer, 0, len * size_of::<T>()) })?;
        settle()?;
        Ok(buffer)
    }

    pub(crate) fn from_slice(context: &Arc<Context>, values: &[T], what: &str) -> Result<Self, CudaError> {
        let buffer = Self::new(context, values.len(), what)?;
        buffer.write(0, values)?;
        Ok(buffer)
    }

    /// Device address of value `index`.
    pub(crate) fn at(&self, index: usize) -> u64 {
        assert!(index <= self.len, "an address stays inside its buffer");
        self.pointer + (index * size_of::<T>()) as u64
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Copies host values in and waits.
    pub(crate) fn write(&self, at: usize, values: &[T]) -> Result<(), CudaError> {
        assert!(at <= self.len && values.len() <= self.len - at, "a copy stays inside its buffer");
        self.context.bind()?;
        // SAFETY: both ranges are valid for the length, checked above.
        check("cuMemcpyHtoD", unsafe {
            sys::cuMemcpyHtoD_v2(self.at(at), values.as_ptr().cast(), size_of_val(values))
        })?;
        settle()
    }

    /// Copies values out and waits.
    pub(crate) fn read(&self, at: usize, values: &mut [T]) -> Result<(), CudaError> {
        assert!(at <= self.len && values.len() <= self.len - at, "a copy stays inside its buffer");
        self.context.bind()?;
        // SAFETY: both ranges are valid for the length, checked above.
        check("cuMemcpyDtoH", unsafe {
            sys::cuMemcpyDtoH_v2(values.as_mut_ptr().cast(), self.at(at), size_of_val(values))
        })
    }
}

impl<T> Drop for Buffer<T> {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `new`, freed once; the driver waits for work that uses it.
            unsafe { sys::cuMemFree_v2(self.pointer) };
        }
    }
}

/// Page-locked host memory: copies to and from it run at full speed and beside other work.
pub(crate) struct Pinned<T> {
    context: Arc<Context>,
    pointer: *mut T,
    len: usize,
}

// SAFETY: plain memory, owned.
unsafe impl<T: Send> Send for Pinned<T> {}
// SAFETY: shared references only read.
unsafe impl<T: Sync> Sync for Pinned<T> {}

impl<T: Plain> Pinned<T> {
    pub(crate) fn zeroed(context: &Arc<Context>, len: usize) -> Result<Self, CudaError> {
        context.bind()?;
        let bytes = bytes_of::<T>(len)?;
        let mut pointer = std::ptr::null_mut();
        // SAFETY: valid out pointer, context bound; freed in drop.
        check("cuMemHostAlloc", unsafe { sys::cuMemHostAlloc(&raw mut pointer, bytes, 0) })?;
        // SAFETY: the driver returned this many bytes. All-zero bytes are valid for the plain numbers stored here.
        unsafe { pointer.cast::<u8>().write_bytes(0, bytes) };
        Ok(Self { context: context.clone(), pointer: pointer.cast(), len })
    }

    pub(crate) fn slice(&self) -> &[T] {
        // SAFETY: `len` initialised values; device writes are only outstanding inside executor calls, which wait, also when
        // they fail ([`Settle`]).
        unsafe { std::slice::from_raw_parts(self.pointer, self.len) }
    }

    pub(crate) fn slice_mut(&mut self) -> &mut [T] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.pointer, self.len) }
    }
}

impl<T> Drop for Pinned<T> {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: allocated in `zeroed`, freed once.
            unsafe { sys::cuMemFreeHost(self.pointer.cast()) };
        }
    }
}

/// An ordered queue of device work.
pub(crate) struct Stream {
    context: Arc<Context>,
    queue: Arc<Queue>,
}

/// The driver's handle of a stream.
struct Queue {
    context: Arc<Context>,
    stream: sys::CUstream,
}

// SAFETY: a stream may be used from any thread; the executor is used by one at a time.
unsafe impl Send for Queue {}
// SAFETY: the driver's functions on a stream may be called from several threads.
unsafe impl Sync for Queue {}

impl Queue {
    fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        check("cuStreamSynchronize", unsafe { sys::cuStreamSynchronize(self.stream) })
    }
}

/// Waits for the device when it is dropped, so that no copy is outstanding when a call ends early, by an error or a panic:
/// the next one writes the same host memory.
#[must_use = "it waits when it is dropped"]
pub(crate) struct Settle(Arc<Queue>);

impl Drop for Settle {
    fn drop(&mut self) {
        // After an error the context may be lost; then nothing is outstanding.
        let _ = self.0.synchronize();
    }
}

impl Stream {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let mut stream = std::ptr::null_mut();
        let flags = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: valid out pointer, context bound; destroyed in drop.
        check("cuStreamCreate", unsafe { sys::cuStreamCreate(&raw mut stream, flags) })?;
        let queue = Arc::new(Queue { context: context.clone(), stream });
        Ok(Self { context: context.clone(), queue })
    }

    /// Waits for all work.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        self.queue.synchronize()
    }

    /// Waits for all work when it is dropped, whatever happened before.
    pub(crate) fn settle_at_end(&self) -> Settle {
        Settle(Arc::clone(&self.queue))
    }

    /// Starts copying the first `count` values to the device.
    pub(crate) fn upload<T: Plain>(
        &self,
        from: &Pinned<T>,
        from_at: usize,
        to: &Buffer<T>,
        to_at: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        let inside = |at: usize, len: usize| at <= len && count <= len - at;
        assert!(inside(from_at, from.len) && inside(to_at, to.len), "a copy stays inside its buffers");
        // SAFETY: ranges checked; the pinned memory is not written before the executor has waited for the stream.
        check("cuMemcpyHtoDAsync", unsafe {
            let source = from.pointer.add(from_at).cast::<c_void>();
            sys::cuMemcpyHtoDAsync_v2(to.at(to_at), source, count * size_of::<T>(), self.queue.stream)
        })
    }

    /// Starts copying values `at .. at + count` to the same place on the host.
    pub(crate) fn download<T: Plain>(
        &self,
        from: &Buffer<T>,
        to: &mut Pinned<T>,
        at: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        self.download_to(from, at, to, at, count)
    }

    /// The same from one place to another.
    pub(crate) fn download_to<T: Plain>(
        &self,
        from: &Buffer<T>,
        from_at: usize,
        to: &mut Pinned<T>,
        to_at: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        let inside = |at: usize, len: usize| at <= len && count <= len - at;
        assert!(inside(from_at, from.len) && inside(to_at, to.len), "a copy stays inside its buffers");
        // SAFETY: ranges checked; the pinned memory is not read before the executor has waited for the stream.
        check("cuMemcpyDtoHAsync", unsafe {
            let target = to.pointer.add(to_at).cast();
            sys::cuMemcpyDtoHAsync_v2(target, from.at(from_at), count * size_of::<T>(), self.queue.stream)
        })
    }

    /// Marks what has been launched so far; the mark moves when it is made again.
    pub(crate) fn mark(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live.
        check("cuEventRecord", unsafe { sys::cuEventRecord(event.event, self.queue.stream) })
    }

    /// What is launched from now on begins when what stands before the mark of another stream has ended.
    pub(crate) fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both live; an event that was never recorded is none to wait for.
        check("cuStreamWaitEvent", unsafe { sys::cuStreamWaitEvent(self.queue.stream, event.event, 0) })
    }

    /// Starts copying the first `count` values to another place on the device.
    pub(crate) fn copy<T: Plain>(
        &self,
        from: &Buffer<T>,
        to: &Buffer<T>,
        to_at: usize,
        count: usize,
    ) -> Result<(), CudaError> {
        let inside = count <= from.len && to_at <= to.len && count <= to.len - to_at;
        assert!(inside, "a copy stays inside its buffers");
        // SAFETY: ranges checked; both buffers live until the stream has been waited for.
        check("cuMemcpyDtoDAsync", unsafe {
            sys::cuMemcpyDtoDAsync_v2(to.at(to_at), from.at(0), count * size_of::<T>(), self.queue.stream)
        })
    }

    /// Launches a kernel.
    pub(crate) fn launch<A: KernelArgs>(
        &self,
        function: &Function,
        shape: Launch,
        args: &A,
    ) -> Result<(), CudaError> {
        // SAFETY: an all-zero attribute is valid (the id is set below, the value is plain memory).
        let mut attributes: [sys::CUlaunchAttribute; 2] = unsafe { std::mem::zeroed() };
        let mut count = 0;
        if shape.overlap && self.context.arch >= 90 {
            attributes[0].id =
                sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[0].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        if shape.cluster > 1 {
            attributes[count].id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            attributes[count].value.clusterDim =
                sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: shape.cluster, y: 1, z: 1 };
            count += 1;
        }
        let config = sys::CUlaunchConfig {
            gridDimX: shape.grid.0,
            gridDimY: shape.grid.1,
            gridDimZ: 1,
            blockDimX: shape.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shape.shared_bytes,
            hStream: self.queue.stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: count as u32,
        };
        let mut parameters = [std::ptr::from_ref(args).cast_mut().cast::<c_void>()];
        // SAFETY: the arguments match the kernel by `KernelArgs`; the pointers inside were made by the executor from
        // live buffers whose sizes it has checked against the shapes.
        let launched = check("cuLaunchKernelEx", unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                function.function,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        });
        launched.map_err(|error| match error {
            CudaError::Call { call, what } => {
                CudaError::Call { call, what: format!("{what}: {} as {shape:?}", function.name()) }
            }
            other => other,
        })
    }

    /// Records what `work` launches into a graph instead of running it.
    pub(crate) fn capture(&self, work: impl FnOnce() -> Result<(), CudaError>) -> Result<Graph, CudaError> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives and is not capturing.
        check("cuStreamBeginCapture", unsafe { sys::cuStreamBeginCapture_v2(self.queue.stream, mode) })?;
        let worked = work();
        let mut graph = std::ptr::null_mut();
        // SAFETY: ends the capture begun above, whatever `work` said.
        let ended = check("cuStreamEndCapture", unsafe {
            sys::cuStreamEndCapture(self.queue.stream, &raw mut graph)
        });
        worked?;
        ended?;
        let mut executable = std::ptr::null_mut();
        // SAFETY: the graph was just made; the executable does not refer to it.
        let made = check("cuGraphInstantiate", unsafe {
            sys::cuGraphInstantiateWithFlags(&raw mut executable, graph, 0)
        });
        // SAFETY: made above, destroyed once.
        unsafe { sys::cuGraphDestroy(graph) };
        made?;
        Ok(Graph { context: self.context.clone(), executable })
    }

    pub(crate) fn replay(&self, graph: &Graph) -> Result<(), CudaError> {
        // SAFETY: both live; the buffers that the graph names belong to the executor that owns the graph.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(graph.executable, self.queue.stream) })
    }
}

impl Drop for Queue {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `Stream::new`, destroyed once.
            unsafe { sys::cuStreamDestroy_v2(self.stream) };
        }
    }
}

/// A mark in a stream that others can wait for.
pub(crate) struct Event {
    context: Arc<Context>,
    event: sys::CUevent,
}

// SAFETY: an event may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    pub(crate) fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        context.bind()?;
        let mut event = std::ptr::null_mut();
        let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32;
        // SAFETY: valid out pointer, context bound; destroyed in drop.
        check("cuEventCreate", unsafe { sys::cuEventCreate(&raw mut event, flags) })?;
        Ok(Self { context: context.clone(), event })
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `new`, destroyed once.
            unsafe { sys::cuEventDestroy_v2(self.event) };
        }
    }
}

/// Shape of a launch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Launch {
    /// CTAs.
    pub(crate) grid: (u32, u32),
    /// Threads of a CTA.
    pub(crate) threads: u32,
    /// Dynamic shared memory.
    pub(crate) shared_bytes: u32,
    /// CTAs of a cluster (sm_90 on), 1 for none.
    pub(crate) cluster: u32,
    /// May this kernel start while the one before still runs? (It waits for it before it touches its results.)
    pub(crate) overlap: bool,
}

impl Launch {
    pub(crate) fn new(grid: (u32, u32), threads: u32) -> Self {
        Self { grid, threads, shared_bytes: 0, cluster: 1, overlap: true }
    }
}

/// A loaded kernel.
#[derive(Clone, Copy)]
pub(crate) struct Function {
    function: sys::CUfunction,
}

impl Function {
    /// The kernel's name, for errors.
    fn name(self) -> String {
        let mut name = std::ptr::null();
        // SAFETY: the function lives; the driver points to a zero-terminated string of the module, or says that it cannot.
        let known = unsafe { sys::cuFuncGetName(&raw mut name, self.function) } == CUresult::CUDA_SUCCESS;
        if !known || name.is_null() {
            return "a kernel".to_owned();
        }
        // SAFETY: see above.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }
}

// SAFETY: a handle into a module that lives as long as the context.
unsafe impl Send for Function {}
// SAFETY: never written through.
unsafe impl Sync for Function {}

/// A loaded kernel file.
pub(crate) struct Module {
    context: Arc<Context>,
    module: sys::CUmodule,
}

// SAFETY: a handle that may be used from any thread.
unsafe impl Send for Module {}

impl Module {
    pub(crate) fn load(context: &Arc<Context>, image: &[u8]) -> Result<Self, CudaError> {
        context.bind()?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a cubin carries its own size; PTX ends with a zero (`nvrtc` makes both).
        check("cuModuleLoadData", unsafe { sys::cuModuleLoadData(&raw mut module, image.as_ptr().cast()) })?;
        Ok(Self { context: context.clone(), module })
    }

    /// Finds a kernel and allows it all the shared memory that the device has for one CTA.
    pub(crate) fn function(&self, name: &str) -> Result<Function, CudaError> {
        let c_name = CString::new(name).expect("kernel names hold no zero byte");
        let mut function = std::ptr::null_mut();
        // SAFETY: module and name live.
        check("cuModuleGetFunction", unsafe {
            sys::cuModuleGetFunction(&raw mut function, self.module, c_name.as_ptr())
        })?;
        let mut fixed = 0;
        let shared = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES;
        // SAFETY: valid out pointer.
        check("cuFuncGetAttribute", unsafe { sys::cuFuncGetAttribute(&raw mut fixed, shared, function) })?;
        let dynamic = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        let most = self.context.shared_bytes as i32 - fixed;
        // SAFETY: the function lives.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, dynamic, most) })?;
        // One division between cache and shared memory for all: a multiprocessor must run empty before it can change it,
        // and a product that wants more would wait for the small kernels still there.
        let carveout = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT;
        // SAFETY: the function lives.
        check("cuFuncSetAttribute", unsafe { sys::cuFuncSetAttribute(function, carveout, 100) })?;
        Ok(Function { function })
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: loaded in `load`, unloaded once.
            unsafe { sys::cuModuleUnload(self.module) };
        }
    }
}

/// A recorded sequence of launches.
pub(crate) struct Graph {
    context: Arc<Context>,
    executable: sys::CUgraphExec,
}

// SAFETY: a handle that may be used from any thread, one at a time.
unsafe impl Send for Graph {}

impl Drop for Graph {
    fn drop(&mut self) {
        if self.context.bind().is_ok() {
            // SAFETY: made in `capture`, destroyed once.
            unsafe { sys::cuGraphExecDestroy(self.executable) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_that_end_the_context_say_so() {
        let check = |result: CUresult, lost: bool| {
            let error = failure("cuStreamSynchronize", result, "words of the driver".to_owned());
            let text = error.to_string();
            assert_eq!(matches!(error, CudaError::Lost { .. }), lost, "{text}");
            assert!(text.contains("cuStreamSynchronize") && text.contains("words of the driver"), "{text}");
            assert_eq!(text.contains("restart"), lost, "{text}");
        };
        check(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS, true);
        check(CUresult::CUDA_ERROR_LAUNCH_FAILED, true);
        check(CUresult::CUDA_ERROR_ECC_UNCORRECTABLE, true);
        check(CUresult::CUDA_ERROR_INVALID_VALUE, false);
        check(CUresult::CUDA_ERROR_OUT_OF_MEMORY, false);
    }
}
