import tempfile, time, torch
from pathlib import Path
from tests.gpu.bench_qwen3 import build, noise, release
from worker.engines.qwen3.engine import Qwen3Engine
import sys
torch.backends.cuda.enable_cudnn_sdp(sys.argv[1] == "1")
with tempfile.TemporaryDirectory() as folder:
    build(Path(folder), "0.6B", "cuda", torch.bfloat16); release()
    t=time.perf_counter(); e = Qwen3Engine(folder, device="cuda", dtype=torch.bfloat16, max_slots=332); e.load(lambda a,b: None); print("load", time.perf_counter()-t)
def ms(work, n=10):
    work(); torch.cuda.synchronize(); t=time.perf_counter()
    for _ in range(n): work()
    h=time.perf_counter()-t; torch.cuda.synchronize()
    return f"{(time.perf_counter()-t)/n*1e3:.2f} ms (host {h/n*1e3:.2f})"
with torch.inference_mode():
    for shape in [(32,128,512),(32,128,256),(64,64,256),(16,128,256),(16,64,256),(1,128,512)]:
        print("extend", shape, ms(lambda: e._catch_up._graphs.replay(shape)))
    for shape in [(32,8),(32,4),(32,2),(16,8),(16,4),(1,8)]:
        print("encode", shape, ms(lambda: e.encoder._graphs.replay(shape)))
    f = torch.randn(32,128,800,device="cuda")
    x = f.to(torch.bfloat16).reshape(32,128,8,100).transpose(1,2).flatten(0,1).unsqueeze(1)
    print("conv 32x8", ms(lambda: e.encoder._convolve(x)))
    for cl in (False, True):
        t = e.encoder._tower
        if cl:
            for c in (t.conv2d1,t.conv2d2,t.conv2d3): c.to(memory_format=torch.channels_last)
            x = x.to(memory_format=torch.channels_last)
        y1=torch.nn.functional.gelu(t.conv2d1(x)); y2=torch.nn.functional.gelu(t.conv2d2(y1)); 
        print("cl", cl, "c1", ms(lambda: t.conv2d1(x)), "c2", ms(lambda: t.conv2d2(y1)), "c3", ms(lambda: t.conv2d3(y2)), "gelu1", ms(lambda: torch.nn.functional.gelu(y1)))
    for shape in e._stepper._graphs._recorded:
        if shape[0] in (8,32,64,128,256,332): print("step", shape, ms(lambda: e._stepper._graphs.replay(shape)))
    clips=[noise(4.0)]*64
    print("mel 64x4s", ms(lambda: e._mel(clips,[400]*64,[None]*64)))
    h = torch.randn(256,1024,device="cuda",dtype=torch.bfloat16)
    from worker.engines.qwen3.sampling import greedy
    print("choose 256", ms(lambda: greedy(e.decoder.logits(h))))
