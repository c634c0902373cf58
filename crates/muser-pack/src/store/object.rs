//! A store in a bucket that speaks S3, so that several machines share packs.
//!
//! There is no catalog: an object is put with "only if there is none", and a manifest that verifies is visible. So a pack
//! that was deleted and put back is not recognised here, and records are not offered. A segment is fetched in one request
//! when it is opened.
//!
//! Calls block; the requests run on threads of the store's own, so a caller may itself be inside an async runtime.

use std::future::Future;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use object_store::{
    BackoffConfig, ClientOptions, Error, ObjectMeta, ObjectStore, ObjectStoreExt as _, PutMode, PutOptions,
    PutPayload, RetryConfig,
};

use super::{Activity, CatalogStore, Listed, PackStore, Put, ReadAt, Usage};
use crate::name::{hex, parse_hex};
use crate::object::{MAX_MANIFEST_BYTES, MAX_SEGMENT_BYTES};
use crate::{Area, ObjectName, PackError, Refusal};

/// Where a bucket is and how patiently it is used.
#[derive(Clone, Debug)]
pub struct BucketOptions {
    /// Name of the bucket.
    pub bucket: String,
    /// Beginning of all keys, without slashes at its ends; may be empty.
    pub prefix: String,
    /// The service, such as `http://127.0.0.1:9000`; `None`: as the environment says (`AWS_ENDPOINT_URL` and its kin).
    pub endpoint: Option<String>,
    /// Access key and its secret; `None`: as the environment says.
    pub credentials: Option<(String, String)>,
    /// Longest time for one request.
    pub request_timeout: Duration,
    /// Requests are repeated so often after a server's error or a broken connection.
    pub retries: usize,
}

/// The store.
pub struct BucketStore {
    store: Arc<dyn ObjectStore>,
    prefix: String,
    describe: String,
    runtime: Option<tokio::runtime::Runtime>,
    /// How many of this process are active; `usize::MAX` while garbage is collected.
    active: Arc<Mutex<usize>>,
}

impl BucketStore {
    /// Opens a bucket. Nothing is asked of it yet.
    pub fn open(options: &BucketOptions) -> Result<Self, PackError> {
        // The first to set the process's provider wins, and every part of muser sets the same one.
        let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
        let mut builder = AmazonS3Builder::from_env()
            .with_bucket_name(&options.bucket)
            .with_allow_http(true)
            .with_client_options(
                ClientOptions::new().with_allow_http(true).with_timeout(options.request_timeout),
            )
            .with_retry(RetryConfig {
                backoff: BackoffConfig {
                    init_backoff: Duration::from_millis(50),
                    max_backoff: Duration::from_secs(2),
                    base: 2.0,
                },
                max_retries: options.retries,
                retry_timeout: options.request_timeout * (options.retries as u32 + 1),
            });
        if let Some(endpoint) = &options.endpoint {
            builder = builder.with_endpoint(endpoint).with_region("us-east-1");
        }
        if let Some((key, secret)) = &options.credentials {
            builder = builder.with_access_key_id(key).with_secret_access_key(secret);
        }
        let describe = format!("bucket {}/{}", options.bucket, options.prefix);
        let failed =
            |reason: String| PackError::Remote { action: "opening", object: describe.clone(), reason };
        let store = builder.build().map_err(|error| failed(error.to_string()))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(2)
            .thread_name("pack-bucket")
            .enable_all()
            .build()
            .map_err(|error| failed(error.to_string()))?;
        Ok(Self {
            store: Arc::new(store),
            prefix: options.prefix.clone(),
            describe,
            runtime: Some(runtime),
            active: Arc::default(),
        })
    }

    fn path(&self, name: &ObjectName) -> Path {
        Path::from_iter([self.prefix.as_str(), name.area.folder(), &hex(&name.id)])
    }

    /// Runs a request on the store's own threads and waits for it.
    fn wait<T: Send + 'static>(
        &self,
        action: &'static str,
        object: String,
        request: impl Future<Output = Result<T, Error>> + Send + 'static,
    ) -> Result<Result<T, Error>, PackError> {
        let (send, receive) = std::sync::mpsc::sync_channel(1);
        let gone = || PackError::Remote { action, object, reason: "its thread has ended".into() };
        let Some(runtime) = &self.runtime else { return Err(gone()) };
        runtime.spawn(async move {
            let _ = send.send(request.await);
        });
        receive.recv().map_err(|_| gone())
    }

    fn failed(action: &'static str, object: &(impl ToString + ?Sized), error: &Error) -> PackError {
        PackError::Remote { action, object: object.to_string(), reason: chain(error) }
    }

    fn look(&self, name: &ObjectName) -> Result<Option<ObjectMeta>, PackError> {
        let (store, path) = (Arc::clone(&self.store), self.path(name));
        let found = self.wait("looking", name.to_string(), async move { store.head(&path).await })?;
        match found {
            Ok(meta) => Ok(Some(meta)),
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Self::failed("looking", name, &error)),
        }
    }
}

impl BucketStore {
    fn put_with(&self, name: &ObjectName, parts: &[&[u8]], mode: PutMode) -> Result<Put, PackError> {
        let (store, path) = (Arc::clone(&self.store), self.path(name));
        let payload = PutPayload::from(parts.concat());
        let options = PutOptions { mode, ..PutOptions::default() };
        let put =
            self.wait(
                "putting",
                name.to_string(),
                async move { store.put_opts(&path, payload, options).await },
            )?;
        match put {
            Ok(_) => Ok(Put::Stored),
            Err(Error::AlreadyExists { .. } | Error::Precondition { .. }) => Ok(Put::Exists),
            Err(error) => Err(Self::failed("putting", name, &error)),
        }
    }
}

impl Drop for BucketStore {
    fn drop(&mut self) {
        // Waiting for its threads is not allowed inside an async runtime.
        if let Some(runtime) = self.runtime.take() {
            runtime.shutdown_background();
        }
    }
}

impl PackStore for BucketStore {
    fn describe(&self) -> String {
        self.describe.clone()
    }

    fn put(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<Put, PackError> {
        self.put_with(name, parts, PutMode::Create)
    }

    fn open(&self, name: &ObjectName) -> Result<Option<Box<dyn ReadAt>>, PackError> {
        let (store, path) = (Arc::clone(&self.store), self.path(name));
        let limit = MAX_MANIFEST_BYTES.max(MAX_SEGMENT_BYTES);
        let got = self.wait("getting", name.to_string(), async move {
            let got = store.get(&path).await?;
            let size = got.meta.size;
            // Nothing larger can be an object of ours; it is not brought here to find out.
            if size > limit { Ok(Err(size)) } else { got.bytes().await.map(|bytes| Ok((bytes, size))) }
        })?;
        match got {
            Ok(Ok((bytes, size))) => {
                let found = bytes.len() as u64;
                if found != size {
                    return Err(PackError::refused(name, Refusal::Truncated { expected: size, found }));
                }
                Ok(Some(Box::new(Fetched { name: *name, bytes })))
            }
            Ok(Err(found)) => {
                Err(PackError::refused(name, Refusal::OverLimit { field: "object bytes", limit, found }))
            }
            Err(Error::NotFound { .. }) => Ok(None),
            Err(error) => Err(Self::failed("getting", name, &error)),
        }
    }

    fn contains(&self, name: &ObjectName) -> Result<bool, PackError> {
        Ok(self.look(name)?.is_some())
    }

    fn delete(&self, name: &ObjectName) -> Result<bool, PackError> {
        // S3 does not tell whether there was something to delete.
        if self.look(name)?.is_none() {
            return Ok(false);
        }
        let (store, path) = (Arc::clone(&self.store), self.path(name));
        let deleted = self.wait("deleting", name.to_string(), async move { store.delete(&path).await })?;
        match deleted {
            Ok(()) => Ok(true),
            Err(Error::NotFound { .. }) => Ok(false),
            Err(error) => Err(Self::failed("deleting", name, &error)),
        }
    }

    fn quarantine(&self, _name: &ObjectName) -> Result<(), PackError> {
        // Other machines read it too, and a fault may have been on the way here.
        Ok(())
    }

    fn replace(&self, name: &ObjectName, parts: &[&[u8]]) -> Result<(), PackError> {
        self.put_with(name, parts, PutMode::Overwrite).map(drop)
    }

    fn list(&self, area: Area) -> Result<Vec<Listed>, PackError> {
        use futures_util::TryStreamExt as _;
        let store = Arc::clone(&self.store);
        let prefix = Path::from_iter([self.prefix.as_str(), area.folder()]);
        let listed = self.wait("listing", area.folder().into(), async move {
            store.list(Some(&prefix)).try_collect::<Vec<_>>().await
        })?;
        let listed = listed.map_err(|error| Self::failed("listing", area.folder(), &error))?;
        let ours = |meta: ObjectMeta| {
            let id = parse_hex(meta.location.filename()?)?;
            let used_unix_ns = meta.last_modified.timestamp_nanos_opt().map_or(0, |time| time.max(0) as u64);
            Some(Listed { name: ObjectName { area, id }, bytes: meta.size, used_unix_ns })
        };
        Ok(listed.into_iter().filter_map(ours).collect())
    }

    fn touch(&self, _name: &ObjectName) {}

    fn flush(&self) -> Result<(), PackError> {
        Ok(())
    }

    fn usage(&self) -> Result<Usage, PackError> {
        let mut held_bytes = 0;
        for area in Area::ALL {
            held_bytes += self.list(area)?.iter().map(|listed| listed.bytes).sum::<u64>();
        }
        Ok(Usage { held_bytes, budget_bytes: None })
    }

    fn clean(&self) -> Result<u64, PackError> {
        Ok(0)
    }

    fn activity(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        let mut count = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        if *count == usize::MAX {
            return Ok(None);
        }
        *count += 1;
        Ok(Some(Box::new(super::memory::Active { count: Arc::clone(&self.active) })))
    }

    /// Knows of this process only. A collection may take a segment from another machine's unfinished publication, which
    /// then fails or leaves a pack with a gap: a miss, never a wrong row.
    fn quiet(&self) -> Result<Option<Box<dyn Activity>>, PackError> {
        let mut count = self.active.lock().unwrap_or_else(PoisonError::into_inner);
        if *count != 0 {
            return Ok(None);
        }
        *count = usize::MAX;
        Ok(Some(Box::new(super::memory::Active { count: Arc::clone(&self.active) })))
    }

    fn catalog(&self) -> Option<&dyn CatalogStore> {
        None
    }
}

struct Fetched {
    name: ObjectName,
    bytes: bytes::Bytes,
}

impl ReadAt for Fetched {
    fn len(&self) -> Result<u64, PackError> {
        Ok(self.bytes.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<(), PackError> {
        super::memory::read_slice(self.name, &self.bytes, offset, out)
    }
}

/// An error with its causes: the outermost alone says little.
fn chain(error: &Error) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text.push_str(": ");
            text.push_str(&cause_text);
        }
        source = cause.source();
    }
    text
}
