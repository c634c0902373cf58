//! Where requests are worked on, so that whoever computes never holds up a connection.
//!
//! Connections, `/health` and streams are driven by the server's own threads. Everything that a POST does until its answer
//! begins runs in a [`WorkRoom`]: other threads, of lower priority where the system has such a thing. What may take long
//! there (JSON of megabytes, templates, grammars, tokenizing) goes through [`compute`], which lets few such jobs run at
//! once, long bodies apart from short ones. A client that leaves takes its job out of the queue. The memory for bodies is
//! one budget for all connections; a body gives its share back when its request has been answered.

use std::cell::{Cell, RefCell};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, LazyLock};

use axum::extract::{Request, State};
use axum::http::Method;
use axum::middleware::Next;
use axum::response::Response;
use tokio::runtime::{Builder, Handle, Runtime};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use crate::app::SharedApp;
use crate::body_budget::BodyBudget;
use crate::error::{ApiError, Dialect};
use crate::owner::Owner;

/// Bodies up to this length count as short.
pub(crate) const SHORT_BODY_BYTES: usize = 64 << 10;

/// Threads for requests.
pub(crate) struct WorkRoom(Option<Runtime>);

impl WorkRoom {
    /// Starts the threads.
    pub(crate) fn open() -> std::io::Result<Self> {
        let runtime = Builder::new_multi_thread()
            .worker_threads(processors().clamp(2, 8))
            .thread_name("muser-request")
            .on_thread_start(step_back)
            .enable_all()
            .build()?;
        Ok(Self(Some(runtime)))
    }

    /// To give work to them.
    pub(crate) fn handle(&self) -> Option<Handle> {
        self.0.as_ref().map(|runtime| runtime.handle().clone())
    }
}

impl Drop for WorkRoom {
    fn drop(&mut self) {
        // Whoever still computes there has nobody to answer to.
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

fn processors() -> usize {
    std::thread::available_parallelism().map_or(2, usize::from)
}

/// Lets connections and the engine go first.
fn step_back() {
    #[cfg(target_os = "linux")]
    let _ = rustix::process::setpriority_process(None, 5);
}

tokio::task_local! {
    static JOB: Job;
}

/// What is known of the request that is worked on.
struct Job {
    budget: BodyBudget,
    body_bytes: Cell<usize>,
    held: RefCell<Vec<OwnedSemaphorePermit>>,
}

impl Job {
    fn new(budget: BodyBudget) -> Self {
        Self { budget, body_bytes: Cell::new(0), held: RefCell::default() }
    }
}

/// Moves requests that may compute into the work room. Dropping the answer's future ends the work at its next step.
pub(crate) async fn enter(State(app): State<SharedApp>, request: Request, next: Next) -> Response {
    let room = app.work_room().filter(|_| *request.method() != Method::GET);
    // Another task: it is told whose request it works on.
    let owner = match Owner::current() {
        Ok(owner) => owner,
        Err(fault) => return fault.into_response_as(Dialect::of_path(request.uri().path())),
    };
    let work = owner.answering(JOB.scope(Job::new(app.bodies().clone()), next.run(request)));
    let Some(room) = room else { return work.await };
    match EndWithUs(room.spawn(work)).await {
        Ok(response) => response,
        Err(error) if error.is_panic() => std::panic::resume_unwind(error.into_panic()),
        Err(_) => ApiError::unavailable("The server is stopping").into_response_as(Dialect::OpenAi),
    }
}

/// A task that ends when nobody waits for it any more; one that has not begun never does.
struct EndWithUs<T>(JoinHandle<T>);

impl<T> Future for EndWithUs<T> {
    type Output = Result<T, tokio::task::JoinError>;

    fn poll(
        mut self: std::pin::Pin<&mut Self>,
        cx: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Self::Output> {
        std::pin::Pin::new(&mut self.0).poll(cx)
    }
}

impl<T> Drop for EndWithUs<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

struct Lanes {
    short: Semaphore,
    long: Semaphore,
}

static LANES: LazyLock<Lanes> = LazyLock::new(|| Lanes {
    short: Semaphore::new((2 * processors()).max(4)),
    long: Semaphore::new((processors() / 2).max(1)),
});

/// Runs a computation of this request on a thread that may block, in its turn.
pub(crate) async fn compute<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let body_bytes = JOB.try_with(|job| job.body_bytes.get()).unwrap_or(0);
    let lane = if body_bytes <= SHORT_BODY_BYTES { &LANES.short } else { &LANES.long };
    let _turn = lane.acquire().await.map_err(|_| lost())?;
    run_blocking(work).await
}

/// Runs work that waits, for a disk or a network, on a thread that may block.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T, ApiError> + Send + 'static,
) -> Result<T, ApiError> {
    let (leaves, left) = Leaves::new();
    let work = move || {
        LEFT.set(Some(left));
        let outcome = work();
        LEFT.set(None);
        outcome
    };
    let outcome = EndWithUs(tokio::task::spawn_blocking(work)).await;
    drop(leaves);
    outcome.unwrap_or_else(|_| Err(lost()))
}

thread_local! {
    /// Whether whoever waits for the work on this thread has left.
    static LEFT: RefCell<Option<Arc<AtomicBool>>> = const { RefCell::new(None) };
}

/// Whether somebody still waits for the work that runs on this thread. Long work asks now and then, and gives up.
pub(crate) fn still_wanted() -> bool {
    LEFT.with_borrow(|left| left.as_ref().is_none_or(|left| !left.load(Ordering::Relaxed)))
}

/// Tells the work that its client has left, when it is dropped.
struct Leaves(Arc<AtomicBool>);

impl Leaves {
    fn new() -> (Self, Arc<AtomicBool>) {
        let left = Arc::new(AtomicBool::new(false));
        (Self(Arc::clone(&left)), left)
    }
}

impl Drop for Leaves {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

fn lost() -> ApiError {
    ApiError::internal("The server failed while it prepared this request; its log has the reason")
}

/// Takes memory for this request's body until it is answered; waits a little if others have it.
pub(crate) async fn reserve(bytes: usize) -> Result<(), ApiError> {
    let Ok(budget) = JOB.try_with(|job| job.budget.clone()) else { return Ok(()) };
    let permit = budget.take(bytes).await?;
    let _ = JOB.try_with(|job| job.held.borrow_mut().push(permit));
    Ok(())
}

/// Notes the length of the request's body: long ones queue among themselves.
pub(crate) fn note_body(bytes: usize) {
    let _ = JOB.try_with(|job| job.body_bytes.set(job.body_bytes.get().max(bytes)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn the_budget_is_shared_and_given_back() {
        let budget = BodyBudget::new(1 << 20);
        let held = tokio::spawn(JOB.scope(Job::new(budget.clone()), async {
            reserve(600 << 10).await?;
            tokio::time::sleep(Duration::from_secs(15)).await;
            Ok::<_, ApiError>(())
        }));
        tokio::time::sleep(Duration::from_secs(1)).await;
        let other = |bytes: usize| {
            JOB.scope(Job::new(budget.clone()), async move {
                reserve(bytes).await.map_err(|fault| fault.status.as_u16())
            })
        };
        assert_eq!(other(300 << 10).await, Ok(()));
        assert_eq!(other(600 << 10).await, Err(429));
        held.await.expect("ends").expect("fits");
        assert_eq!(other(600 << 10).await, Ok(()));
        // More than there is: all of it.
        assert_eq!(other(8 << 20).await, Ok(()));
    }

    /// Jobs that run hear that their client has left; the next job on the same thread does not.
    #[tokio::test]
    async fn who_leaves_is_heard_by_running_work() {
        let (begun, ended) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
        let work = {
            let (begun, ended) = (Arc::clone(&begun), Arc::clone(&ended));
            run_blocking(move || {
                begun.store(true, Ordering::SeqCst);
                let since = std::time::Instant::now();
                while still_wanted() && since.elapsed() < Duration::from_secs(20) {
                    std::thread::sleep(Duration::from_millis(2));
                }
                ended.store(since.elapsed() < Duration::from_secs(10), Ordering::SeqCst);
                Ok(())
            })
        };
        let waiting = tokio::spawn(work);
        while !begun.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        waiting.abort();
        let since = std::time::Instant::now();
        while !ended.load(Ordering::SeqCst) {
            assert!(since.elapsed() < Duration::from_secs(10), "it goes on");
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
        assert_eq!(run_blocking(|| Ok(still_wanted())).await.ok(), Some(true));
        assert!(still_wanted());
    }

    /// Jobs of clients that left are never begun.
    #[tokio::test]
    async fn who_leaves_takes_the_job_along() {
        let begun = Arc::new(AtomicUsize::new(0));
        let job = |time: Duration| {
            let begun = Arc::clone(&begun);
            let work = compute(move || {
                begun.fetch_add(1, Ordering::SeqCst);
                std::thread::sleep(time);
                Ok(())
            });
            JOB.scope(Job::new(BodyBudget::new(1 << 20)), async move {
                note_body(SHORT_BODY_BYTES + 1);
                work.await
            })
        };
        let places = (processors() / 2).max(1);
        let running: Vec<_> = (0..places).map(|_| tokio::spawn(job(Duration::from_millis(300)))).collect();
        while begun.load(Ordering::SeqCst) < places {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let leaving: Vec<_> = (0..50).map(|_| tokio::spawn(job(Duration::from_secs(5)))).collect();
        tokio::time::sleep(Duration::from_millis(50)).await;
        leaving.iter().for_each(JoinHandle::abort);
        for task in running {
            task.await.expect("runs").expect("well");
        }
        job(Duration::ZERO).await.expect("its turn comes");
        assert_eq!(begun.load(Ordering::SeqCst), places + 1);
    }
}
