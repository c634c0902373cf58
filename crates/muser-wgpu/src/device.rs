//! The host layer: the only module that names wgpu. Another host could take its place: what leaves here are buffers, kernels,
//! bindings and recordings, and errors as values.
//!
//! wgpu reports most errors to a handler, in the call that made them; here the handler notes them, and [`Device::check`], called
//! after every such call, hands them out. A device that is lost stays lost.
#![allow(
    unsafe_code,
    reason = "shaders without bounds checks, memory sizes of the driver, a pipeline cache from disk"
)]

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::WgpuError;

mod cache;
mod choice;
mod memory;

pub use choice::{AdapterFacts, AdapterKind, adapters};

/// Most bytes of a static parameter block, and the distance from one to the next.
pub(crate) const PARAMS_BYTES: u64 = 256;

/// What an error handler noted.
#[derive(Default)]
struct Faults {
    first: Option<(bool, String)>,
    lost: Option<String>,
}

/// An open device.
pub(crate) struct Device {
    device: wgpu::Device,
    queue: wgpu::Queue,
    faults: Arc<Mutex<Faults>>,
    cache: Option<cache::Cache>,
    /// Bytes of memory in use by buffers of ours.
    used: Arc<AtomicU64>,
    /// Texts of kernels that are replaced, for tests.
    pub(crate) mutations: Vec<(String, String)>,
    /// What it is.
    pub(crate) facts: AdapterFacts,
}

/// Device memory.
pub(crate) struct Buffer {
    raw: wgpu::Buffer,
    size: u64,
    /// Where its bytes are counted.
    used: Option<Arc<AtomicU64>>,
}

impl Drop for Buffer {
    fn drop(&mut self) {
        if let Some(used) = &self.used {
            used.fetch_sub(self.size, Ordering::Relaxed);
        }
    }
}

impl Buffer {
    pub(crate) fn size(&self) -> u64 {
        self.size
    }
}

/// What a kernel's binding is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Slot {
    /// Parameters.
    Uniform,
    /// Memory that is read.
    Read,
    /// Memory that is written, too.
    Write,
}

/// A kernel: buffers can be bound to it at once, it runs when it is compiled.
pub(crate) struct Kernel {
    pub(crate) name: String,
    text: String,
    layout: wgpu::BindGroupLayout,
    pipeline: OnceLock<wgpu::ComputePipeline>,
}

/// Buffers for the bindings of a kernel.
pub(crate) struct Bindings(wgpu::BindGroup);

/// A part of a buffer.
#[derive(Clone, Copy)]
pub(crate) struct View<'a> {
    pub(crate) buffer: &'a Buffer,
    pub(crate) offset: u64,
    pub(crate) bytes: u64,
}

impl<'a> From<&'a Buffer> for View<'a> {
    fn from(buffer: &'a Buffer) -> Self {
        Self { buffer, offset: 0, bytes: buffer.size }
    }
}

/// Work that is being written down.
pub(crate) struct Recorder {
    encoder: wgpu::CommandEncoder,
    pass: Option<wgpu::ComputePass<'static>>,
    /// A kernel that was dispatched and is not compiled: a bug of ours.
    missing: Option<String>,
}

impl Device {
    /// Opens the adapter that `wanted` names (a part of its name, or its number), or the best one that is no software.
    pub(crate) fn open(wanted: Option<&str>, binding_limit: Option<u64>) -> Result<Self, WgpuError> {
        let (adapter, facts) = choice::choose(wanted)?;
        let unsuitable = |needed: &str, found: String| {
            Err(WgpuError::Unsuitable { device: facts.name.clone(), needed: needed.to_owned(), found })
        };
        let limits = adapter.limits();
        if limits.max_compute_invocations_per_workgroup < 256 {
            let found = limits.max_compute_invocations_per_workgroup.to_string();
            return unsuitable("256 invocations of a workgroup", found);
        }
        if limits.max_compute_workgroup_storage_size < 16 << 10 {
            let found = limits.max_compute_workgroup_storage_size.to_string();
            return unsuitable("16 KiB of workgroup memory", found);
        }
        let wished = wgpu::Features::SUBGROUP | wgpu::Features::PIPELINE_CACHE;
        let descriptor = wgpu::DeviceDescriptor {
            required_features: adapter.features() & wished,
            required_limits: limits,
            memory_hints: wgpu::MemoryHints::MemoryUsage,
            ..Default::default()
        };
        let (device, queue) = pollster::block_on(adapter.request_device(&descriptor)).map_err(|error| {
            WgpuError::Call { call: format!("opening {}", facts.name), what: error.to_string() }
        })?;
        let faults = Arc::new(Mutex::new(Faults::default()));
        let noted = Arc::clone(&faults);
        device.on_uncaptured_error(Arc::new(move |error| {
            let memory = matches!(error, wgpu::Error::OutOfMemory { .. });
            let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
            noted.first.get_or_insert((memory, error.to_string()));
        }));
        let noted = Arc::clone(&faults);
        device.set_device_lost_callback(move |reason, what| {
            let mut noted = noted.lock().unwrap_or_else(PoisonError::into_inner);
            noted.lost.get_or_insert(format!("{reason:?} {what}"));
        });
        let cache = cache::Cache::open(&adapter, &device);
        let facts =
            AdapterFacts { binding: binding_limit.unwrap_or(facts.binding).min(facts.binding), ..facts };
        Ok(Self { device, queue, faults, cache, used: Arc::default(), mutations: Vec::new(), facts })
    }

    /// What the handlers noted since the last time.
    pub(crate) fn check(&self, call: impl Fn() -> String) -> Result<(), WgpuError> {
        let mut faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(what) = &faults.lost {
            return Err(WgpuError::Lost { call: call(), what: what.clone() });
        }
        match faults.first.take() {
            None => Ok(()),
            Some((true, what)) => Err(WgpuError::OutOfMemory {
                what: format!("{} ({what})", call()),
                needed: 0,
                available: self.available(),
            }),
            Some((false, what)) => Err(WgpuError::Call { call: call(), what }),
        }
    }

    /// Bytes that are left of what the adapter says it has.
    pub(crate) fn available(&self) -> u64 {
        self.facts.memory.unwrap_or(u64::MAX).saturating_sub(self.used.load(Ordering::Relaxed))
    }

    /// Memory for `what`, zeroed.
    pub(crate) fn buffer(&self, bytes: u64, what: &str) -> Result<Buffer, WgpuError> {
        let size = bytes.next_multiple_of(16).max(16);
        let available = self.available();
        if size > available || size > self.facts.buffer {
            let available = available.min(self.facts.buffer);
            return Err(WgpuError::OutOfMemory { what: what.to_owned(), needed: size, available });
        }
        let usage = wgpu::BufferUsages::STORAGE
            | wgpu::BufferUsages::UNIFORM
            | wgpu::BufferUsages::COPY_SRC
            | wgpu::BufferUsages::COPY_DST;
        let raw = self.create(size, usage);
        self.check(|| format!("{size} bytes for {what}")).map_err(|error| match error {
            WgpuError::OutOfMemory { .. } => {
                WgpuError::OutOfMemory { what: what.to_owned(), needed: size, available }
            }
            other => other,
        })?;
        self.used.fetch_add(size, Ordering::Relaxed);
        Ok(Buffer { raw, size, used: Some(Arc::clone(&self.used)) })
    }

    fn create(&self, size: u64, usage: wgpu::BufferUsages) -> wgpu::Buffer {
        self.device.create_buffer(&wgpu::BufferDescriptor {
            label: None,
            size,
            usage,
            mapped_at_creation: false,
        })
    }

    /// Memory with this content.
    pub(crate) fn filled<T: bytemuck::NoUninit>(&self, data: &[T], what: &str) -> Result<Buffer, WgpuError> {
        let bytes: &[u8] = bytemuck::cast_slice(data);
        let buffer = self.buffer(bytes.len() as u64, what)?;
        self.write(&buffer, 0, bytes)?;
        Ok(buffer)
    }

    /// Writes bytes; a last part of a word is filled up with zeros.
    pub(crate) fn write(&self, to: &Buffer, offset: u64, bytes: &[u8]) -> Result<(), WgpuError> {
        let whole = bytes.len() / 4 * 4;
        if whole > 0 {
            self.queue.write_buffer(&to.raw, offset, &bytes[..whole]);
        }
        if whole < bytes.len() {
            let mut last = [0; 4];
            last[..bytes.len() - whole].copy_from_slice(&bytes[whole..]);
            self.queue.write_buffer(&to.raw, offset + whole as u64, &last);
        }
        self.check(|| format!("writing {} bytes", bytes.len()))
    }

    /// Reads bytes, after everything that was submitted.
    pub(crate) fn read(&self, from: &Buffer, offset: u64, bytes: &mut [u8]) -> Result<(), WgpuError> {
        let staging = self.staging(bytes.len() as u64)?;
        let mut recorder = self.recorder();
        recorder.copy(from, offset, &staging, 0, bytes.len() as u64);
        self.submit(recorder)?;
        self.fetch(&staging, |data| bytes.copy_from_slice(&data[..bytes.len()]))
    }

    /// Memory that results are copied to, for [`Self::fetch`].
    pub(crate) fn staging(&self, bytes: u64) -> Result<Buffer, WgpuError> {
        let size = bytes.next_multiple_of(16).max(16);
        let raw = self.create(size, wgpu::BufferUsages::MAP_READ | wgpu::BufferUsages::COPY_DST);
        self.check(|| format!("{size} bytes for results"))?;
        Ok(Buffer { raw, size, used: None })
    }

    /// Waits for everything that was submitted and shows the content of a staging buffer.
    pub(crate) fn fetch(&self, staging: &Buffer, take: impl FnOnce(&[u8])) -> Result<(), WgpuError> {
        let mapped = Arc::new(Mutex::new(None));
        let told = Arc::clone(&mapped);
        staging.raw.map_async(wgpu::MapMode::Read, .., move |result| {
            *told.lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
        });
        self.wait()?;
        let failed = |what: String| WgpuError::Call { call: "reading results".to_owned(), what };
        let told = mapped.lock().unwrap_or_else(PoisonError::into_inner).take();
        match told {
            Some(Ok(())) => {}
            other => {
                self.check(|| "reading results".to_owned())?;
                return Err(failed(format!("{other:?}")));
            }
        }
        let view = staging.raw.get_mapped_range(..).map_err(|error| failed(error.to_string()))?;
        take(&view);
        drop(view);
        staging.raw.unmap();
        Ok(())
    }

    /// Waits for everything that was submitted.
    pub(crate) fn wait(&self) -> Result<(), WgpuError> {
        let polled = self.device.poll(wgpu::PollType::wait_indefinitely());
        self.check(|| "waiting for the device".to_owned())?;
        polled.map(|_| ()).map_err(|error| WgpuError::Call {
            call: "waiting for the device".to_owned(),
            what: error.to_string(),
        })
    }

    /// A kernel that [`Self::compile`] has still to compile.
    pub(crate) fn kernel(&self, name: &str, text: String, slots: &[Slot]) -> Result<Kernel, WgpuError> {
        let entries: Vec<_> =
            slots.iter().zip(0..).map(|(slot, binding)| layout_entry(*slot, binding)).collect();
        let descriptor = wgpu::BindGroupLayoutDescriptor { label: Some(name), entries: &entries };
        let layout = self.device.create_bind_group_layout(&descriptor);
        self.check(|| format!("the bindings of kernel {name}"))?;
        let text = self.mutations.iter().fold(text, |text, (from, to)| text.replace(from, to));
        Ok(Kernel { name: name.to_owned(), text, layout, pipeline: OnceLock::new() })
    }

    /// Compiles a kernel, if it is not.
    pub(crate) fn compile(&self, kernel: &Kernel) -> Result<(), WgpuError> {
        if kernel.pipeline.get().is_some() {
            return Ok(());
        }
        let name = &kernel.name;
        let layout = self.device.create_pipeline_layout(&wgpu::PipelineLayoutDescriptor {
            label: Some(name),
            bind_group_layouts: &[Some(&kernel.layout)],
            immediate_size: 0,
        });
        let source = wgpu::ShaderSource::Wgsl(kernel.text.as_str().into());
        let descriptor = wgpu::ShaderModuleDescriptor { label: Some(name), source };
        // SAFETY: every index is computed by kernels of this crate from a batch that was validated, and stays in its buffer; every
        // loop ends.
        let module = unsafe {
            self.device.create_shader_module_trusted(descriptor, wgpu::ShaderRuntimeChecks::unchecked())
        };
        self.check(|| format!("compiling kernel {name}"))?;
        let pipeline = self.device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
            label: Some(name),
            layout: Some(&layout),
            module: &module,
            entry_point: None,
            compilation_options: wgpu::PipelineCompilationOptions {
                zero_initialize_workgroup_memory: false,
                ..Default::default()
            },
            cache: self.cache.as_ref().map(cache::Cache::raw),
        });
        self.check(|| format!("making a pipeline of kernel {name}"))?;
        // Another thread may have been first.
        let _ = kernel.pipeline.set(pipeline);
        Ok(())
    }

    /// Writes the pipeline cache to disk, if there is one and it has grown.
    pub(crate) fn keep_pipelines(&self) {
        if let Some(cache) = &self.cache {
            cache.keep();
        }
    }

    /// Binds buffers to the bindings of a kernel, in order.
    pub(crate) fn bind(&self, kernel: &Kernel, views: &[View<'_>]) -> Result<Bindings, WgpuError> {
        let entries: Vec<_> = views
            .iter()
            .zip(0..)
            .map(|(view, binding)| wgpu::BindGroupEntry {
                binding,
                resource: wgpu::BindingResource::Buffer(wgpu::BufferBinding {
                    buffer: &view.buffer.raw,
                    offset: view.offset,
                    size: std::num::NonZero::new(view.bytes),
                }),
            })
            .collect();
        let group = self.device.create_bind_group(&wgpu::BindGroupDescriptor {
            label: None,
            layout: &kernel.layout,
            entries: &entries,
        });
        self.check(|| "binding buffers".to_owned())?;
        Ok(Bindings(group))
    }

    pub(crate) fn recorder(&self) -> Recorder {
        Recorder {
            encoder: self.device.create_command_encoder(&wgpu::CommandEncoderDescriptor::default()),
            pass: None,
            missing: None,
        }
    }

    /// Starts recorded work.
    pub(crate) fn submit(&self, recorder: Recorder) -> Result<(), WgpuError> {
        let Recorder { encoder, pass, missing } = recorder;
        drop(pass);
        if let Some(name) = missing {
            return Err(WgpuError::Call {
                call: format!("kernel {name}"),
                what: "bug: it was not compiled".into(),
            });
        }
        self.queue.submit([encoder.finish()]);
        self.check(|| "submitting work".to_owned())
    }

    /// Ends the device as a fault would, for tests of what follows.
    pub(crate) fn destroy(&self) {
        self.device.destroy();
    }
}

fn layout_entry(slot: Slot, binding: u32) -> wgpu::BindGroupLayoutEntry {
    let ty = match slot {
        Slot::Uniform => wgpu::BufferBindingType::Uniform,
        Slot::Read => wgpu::BufferBindingType::Storage { read_only: true },
        Slot::Write => wgpu::BufferBindingType::Storage { read_only: false },
    };
    wgpu::BindGroupLayoutEntry {
        binding,
        visibility: wgpu::ShaderStages::COMPUTE,
        ty: wgpu::BindingType::Buffer { ty, has_dynamic_offset: false, min_binding_size: None },
        count: None,
    }
}

impl Recorder {
    /// Runs a kernel on so many workgroups; on none of them is allowed.
    pub(crate) fn dispatch(&mut self, kernel: &Kernel, bindings: &Bindings, [x, y, z]: [u32; 3]) {
        if x == 0 || y == 0 || z == 0 {
            return;
        }
        let Some(pipeline) = kernel.pipeline.get() else {
            self.missing = Some(kernel.name.clone());
            return;
        };
        let encoder = &mut self.encoder;
        let pass = self.pass.get_or_insert_with(|| {
            encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default()).forget_lifetime()
        });
        pass.set_pipeline(pipeline);
        pass.set_bind_group(0, &bindings.0, &[]);
        pass.dispatch_workgroups(x, y, z);
    }

    /// Copies whole words.
    pub(crate) fn copy(&mut self, from: &Buffer, from_at: u64, to: &Buffer, to_at: u64, bytes: u64) {
        self.pass = None;
        let bytes = bytes.next_multiple_of(4);
        self.encoder.copy_buffer_to_buffer(&from.raw, from_at, &to.raw, to_at, bytes);
    }
}
